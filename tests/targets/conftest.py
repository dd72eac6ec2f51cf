"""Tiny checkpoints of several shapes, loaded."""

from typing import Any

import pytest

from mmflash_jax.load import load_target
from tests import tiny
from tests.targets.reference import Loaded

SHAPES: dict[str, dict[str, Any]] = {
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


@pytest.fixture(scope="session", params=SHAPES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny checkpoint of each shape."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny.tiny_qwen35(folder, **SHAPES[request.param])
    target, params = load_target(folder, "float32")
    return Loaded(target, params, model, folder)


@pytest.fixture(scope="session")
def tied(qwen35: tiny.Checkpoint) -> Loaded:
    """The standard tiny checkpoint."""
    target, params = load_target(qwen35.folder, "float32")
    return Loaded(target, params, qwen35.model, qwen35.folder)
