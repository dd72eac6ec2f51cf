"""A small target, prompts of every kind, and their plain answers."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.load import load_target
from mmflash_jax.targets import Target
from tests import tiny, tiny_gemma4
from tests.decode import running
from tests.decode.drafters import Branching, Scripted
from tests.drafts import draft_for, random_params
from tests.targets.prompts import make_prompt
from tests.targets.reference import Loaded
from tests.tiny_gemma4 import FULL, SLIDING

MAX_TOKENS = 40
# Text of several lengths (one over two chunks), one image, three images of different sizes.
PARTS = [
    (5,),
    (61,),
    (3, (4, 6), 4),
    (1, (2, 6), 2, (6, 6), 1, (4, 2), 3),
    (1,),
    (2, (14, 2), 9),
    ((4, 4), 1, (2, 2), 1, (2, 8), 20),
    (33,),
]
# The head is not tied: a random tied model repeats one token for ever.
QWEN35 = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}

# Every kind of layer and of reader, a window below the prompts.
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 10,
}


class Bench(NamedTuple):
    """Everything a decoding test needs.

    prompts, plain: the prompts of PARTS, and the ids of plain decoding.
    """

    target: Target
    params: Any
    model: Any
    folder: Any
    prompts: list[Prompt]
    plain: list[list[int]]

    def some(self, *rows: int, **changes: Any) -> list[Prompt]:
        """Prompts by number, with fields changed."""
        return [dataclasses.replace(self.prompts[row], **changes) for row in rows]

    def sequences(self, *rows: int) -> list[list[int]]:
        """Prompts and plain answers, by token index."""
        return [self.prompts[row].ids.tolist() + self.plain[row] for row in rows]

    def scripted(self, script: Any, **fields: Any) -> tuple[Plan, Any]:
        """Plan and parameters with a drafter that follows a table."""
        stop = fields.pop("stop_ids", ())
        plan = Plan(self.target, Scripted(**fields), stop)
        return plan, {"target": self.params, "drafter": script}

    def branching(self, script: Any, **fields: Any) -> tuple[Plan, Any]:
        """Plan and parameters with a drafter of trees that follows a table."""
        stop = fields.pop("stop_ids", ())
        plan = Plan(self.target, Branching(**fields), stop)
        return plan, {"target": self.params, "drafter": script}

    def undrafted(self, *, stop_ids: tuple[int, ...] = ()) -> tuple[Plan, Any]:
        plan = Plan(self.target, NoDraft(), stop_ids)
        return plan, {"target": self.params, "drafter": {}}

    def dflash(self, **changes: Any) -> tuple[Plan, Any]:
        """Plan and parameters with a random DFlash draft, sliding and full layer."""
        fields = {
            "target_layer_ids": [0, 2],
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "block_size": 8,
        }
        drafter = draft_for(self.folder, **{**fields, **changes})
        params = {"target": self.params, "drafter": random_params(drafter)}
        return Plan(self.target, drafter, ()), params


@pytest.fixture(scope="session", params=["qwen35", "gemma4"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A few layers, all sizes small: what a decoding test compiles decides its time."""
    folder = tmp_path_factory.mktemp("small")
    if request.param == "qwen35":
        vision = {"out_hidden_size": QWEN35["hidden_size"]}
        model = tiny.tiny_qwen35(folder, seed=1, tied=False, text=QWEN35, vision=vision)
    else:
        model = tiny_gemma4.tiny_gemma4(folder, seed=3, text=GEMMA4)
    target, params = load_target(folder, "float32")
    return Loaded(target, params, model, folder)


@pytest.fixture(scope="session")
def bench(small: Loaded) -> Bench:
    target = small.target
    prompts = [
        make_prompt(target, *parts, seed=seed, max_tokens=MAX_TOKENS)
        for seed, parts in enumerate(PARTS)
    ]
    plan, params = Plan(target, NoDraft(), ()), {"target": small.params, "drafter": {}}
    plain = running.answers(running.generate(plan, params, prompts))
    # Answers that repeat one token would pass many a test by chance.
    assert all(len(np.unique(ids)) >= 12 for ids in plain)
    return Bench(target, small.params, small.model, small.folder, prompts, plain)
