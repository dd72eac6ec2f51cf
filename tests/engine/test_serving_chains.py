"""Drafts that draft token after token, or trees, in a running batch whose rows come and go."""

import dataclasses
import json

import numpy as np
import pytest

from mmflash_jax.compilation import compiled_programs
from mmflash_jax.decode.records import Plan
from mmflash_jax.decode.slots import Shape
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import answer
from mmflash_jax.engine.serving import Engine
from mmflash_jax.load import load_drafter, load_target
from tests import tiny
from tests.chains import chain_for
from tests.drafters.eagle3 import Head, layer_config, speculators_config
from tests.engine.test_serving import KINDS, Inbox
from tests.targets.prompts import make_prompt
from tests.tiny_gemma4 import FULL, SLIDING, tiny_gemma4

PACES = ((1, 4), (3, 2), (3, 4))
SHAPE = Shape(slots=3, capacity=128, steps=2, widths=(16, 32), image_sizes=(64, 128), paces=PACES)
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
THREE = {
    "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("family", ["qwen35", "gemma4"])
def test_requests_that_come_and_go_get_their_plain_answers(family, shape, tmp_path):
    """Rows inserted into used slots, widths of all kinds, images, chunks, sampling, penalties."""
    source = tmp_path / "target"
    if family == "qwen35":
        model = tiny.tiny_qwen35(source, tied=False, text=TWO)
    else:
        model = tiny_gemma4(source, seed=3, text=THREE)
    target, target_params = load_target(source, "float32")
    if shape == "chain":
        drafter, params, _ = chain_for(target, model, source, tmp_path / "draft", 3)
    else:
        text = json.loads((source / "config.json").read_text())["text_config"]
        folder = Head(speculators_config(layer_config(text), (0, 1)), captured=2).save(
            tmp_path / "draft"
        )
        drafter, params = load_drafter(
            folder, target, "float32", draft_tokens=3, draft_top_k=2, draft_depth=2
        )
    plan = Plan(target, drafter, (259,))
    params = {"target": target_params, "drafter": params}
    prompts = [
        dataclasses.replace(make_prompt(target, *parts, seed=seed, max_tokens=20), **changes)
        for seed, (parts, changes) in enumerate(KINDS)
    ]
    plain = answer(dataclasses.replace(plan, drafter=NoDraft()), params, prompts, batch=10)
    engine = Engine(plan, params, SHAPE, queue=40)
    engine.warm_up(prompts[2].images[0])
    before = compiled_programs()
    engine.start()
    order = np.random.default_rng(0).permutation(2 * len(prompts)) % len(prompts)
    inboxes = [Inbox() for _ in order]
    for number, inbox in zip(order, inboxes, strict=True):
        engine.submit(prompts[number], inbox)
    for number, inbox in zip(order, inboxes, strict=True):
        assert inbox.wait().ids == plain.completions[number].token_ids
    engine.stop(patience_s=60)
    assert compiled_programs() == before
    for width in (2, 4):
        name = "mmflash_steps_by_draft_width_total"
        assert engine.metrics.registry.get_sample_value(name, {"width": str(width)})
