"""Tiny checkpoints of several shapes, loaded."""

import functools
from pathlib import Path
from typing import Any

import pytest

from mmflash_jax.load import load_target
from tests import tiny, tiny_gemma4
from tests.targets.reference import Loaded
from tests.tiny_gemma4 import FULL, SLIDING

QWEN35: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False, "seed": 1},
    # As in the 0.8B and 2B models, where key and value heads are equal in number.
    "equal heads": {"seed": 2, "text": {"linear_num_value_heads": 2, "linear_value_head_dim": 16}},
    # Four value heads to a key head, one kv head, attention first, other kernel and rotary width.
    "odd": {
        "seed": 3,
        "tied": False,
        "text": {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
    },
}


GEMMA4: dict[str, dict[str, Any]] = {
    "six layers": {},
    # No layer shares keys, nothing is capped, one kv head, everything turns, no clip bounds.
    "own keys": {
        "seed": 1,
        "text": {
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "num_kv_shared_layers": 0,
            "num_key_value_heads": 1,
            "final_logit_softcapping": None,
            "sliding_window": 5,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 1.0,
                    "rope_theta": 1e4,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "vision": {"use_clipped_linears": False},
    },
    # As in E2B: most layers read, their MLP is twice as wide.
    "wide readers": {
        "seed": 2,
        "text": {
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
    },
}
SHAPES = [("qwen35", name) for name in QWEN35] + [("gemma4", name) for name in GEMMA4]
STANDARD = [("qwen35", "tied"), ("gemma4", "six layers")]


@functools.cache
def _make(shape: tuple[str, str], folder: Path) -> Loaded:
    family, name = shape
    if family == "qwen35":
        model = tiny.tiny_qwen35(folder, **QWEN35[name])
    else:
        model = tiny_gemma4.tiny_gemma4(folder, **GEMMA4[name])
    target, params = load_target(folder, "float32")
    return Loaded(target, params, model, folder)


def _loaded(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Loaded:
    folder = factory.getbasetemp() / "targets" / "-".join(request.param).replace(" ", "_")
    return _make(request.param, folder)


@pytest.fixture(scope="session", params=SHAPES, ids=" ".join)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny checkpoint of each shape of each family."""
    return _loaded(request, tmp_path_factory)


@pytest.fixture(scope="session", params=STANDARD, ids=" ".join)
def standard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The first shape of each family."""
    return _loaded(request, tmp_path_factory)


@pytest.fixture(scope="session", params=STANDARD[:1], ids=" ".join)
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The first shape of Qwen3.5."""
    return _loaded(request, tmp_path_factory)


@pytest.fixture(scope="session", params=SHAPES[: len(QWEN35)], ids=" ".join)
def any_qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every shape of Qwen3.5."""
    return _loaded(request, tmp_path_factory)


@pytest.fixture(scope="session", params=STANDARD[1:], ids=" ".join)
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The first shape of Gemma 4."""
    return _loaded(request, tmp_path_factory)
