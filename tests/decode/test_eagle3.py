"""EAGLE-3 in the loop, as a chain and as a tree, on both families."""

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import pytest

from mmflash_jax.decode.prefill import extend, prefill
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters.narrowed import Narrowed
from mmflash_jax.load import load_drafter
from tests.decode import drafters
from tests.decode.running import (
    CAPACITY,
    CHUNK,
    answers,
    assert_state_moves_into_a_slot,
    generate,
    one_step,
    proposals,
    walk,
)
from tests.decode.test_sampling import plain_answers, with_sampling
from tests.drafters.eagle3 import Head, layer_config, speculators_config
from tests.targets import reference
from tests.tolerances import MODEL, assert_close

LAYERS = (0, 1, 2)
SHAPES: dict[str, Any] = {
    "chain": {"draft_tokens": 4},
    "tree": {"draft_tokens": 9, "draft_top_k": 3, "draft_depth": 3},
}
BATCHES = [(2,), (6, 1, 2), tuple(range(8))]


class Drafted(NamedTuple):
    """Plan and parameters with a random draft, and the same draft in torch."""

    plan: Plan
    params: dict[str, Any]
    head: Head


@pytest.fixture(scope="module")
def shapes(bench, tmp_path_factory):
    """A random draft for the target, as a chain and as a tree."""
    text = json.loads((bench.folder / "config.json").read_text())["text_config"]
    head = Head(speculators_config(layer_config(text), LAYERS))
    folder = head.save(tmp_path_factory.mktemp("eagle3"))
    made = {}
    for name, settings in SHAPES.items():
        drafter, params = load_drafter(folder, bench.target, "float32", **settings)
        plan = Plan(bench.target, drafter, ())
        made[name] = Drafted(plan, {"target": bench.params, "drafter": params}, head)
    return made


@pytest.fixture(params=SHAPES)
def eagle(request, shapes):
    return shapes[request.param]


@pytest.fixture
def tree(shapes):
    return shapes["tree"]


@pytest.mark.parametrize("rows", BATCHES)
def test_drafted_ids_are_the_plain_ids(bench, eagle, rows):
    """PARITY: images, prompts of several chunks, rows of every length."""
    states = walk(eagle.plan, eagle.params, bench.some(*rows))
    assert answers(states[-1]) == [bench.plain[row] for row in rows]


def test_a_seed_draws_the_same(bench, tree):
    """PARITY at a temperature; the draft of a sampled row knows the noise of each place."""
    prompts = with_sampling(bench.some(6, 1, 2, 0))
    states = walk(tree.plan, tree.params, prompts)
    assert answers(states[-1]) == plain_answers(bench, prompts)


def test_state_after_rejections_is_that_of_the_known_tokens_at_once(bench, tree):
    """Whatever path through which tree was accepted, keys, values and the last hidden state equal
    those of a prompt that holds the answer already."""
    rows = range(8)
    script = drafters.branching(bench.sequences(*rows))
    shadowed = drafters.Shadowed(drafters.Branching(), tree.plan.drafter)
    plan = dataclasses.replace(tree.plan, drafter=shadowed)
    params = {**tree.params, "drafter": {"script": script, "other": tree.params["drafter"]}}
    state = generate(plan, params, bench.prompts)
    assert answers(state) == [bench.plain[row] for row in rows]
    assert (np.asarray(state.committed).sum(0)[:4] > 0).all(), "branches of several lengths"
    known = [
        dataclasses.replace(extend(prompt, ids[:-1]), max_tokens=2)
        for prompt, ids in zip(bench.prompts, bench.plain, strict=True)
    ]
    wanted = prefill(tree.plan, tree.params, known, capacity=CAPACITY, chunk=CHUNK)
    np.testing.assert_array_equal(state.anchor, wanted.anchor)
    for row, length in enumerate(np.asarray(state.length)):
        assert_close(state.draft.hidden[row], wanted.draft.hidden[row], MODEL, f"hidden of {row}")
        for name in ("k", "v"):
            got, right = (getattr(s.draft.cache, name)[row] for s in (state, wanted))
            assert_close(got[:, 1:length], right[:, 1:length], MODEL, f"{name} of row {row}")


def test_drafts_after_a_prompt_are_those_of_the_reference(bench, eagle):
    """The whole way from a prompt with images to drafts, against transformers' target and a torch
    draft that runs on its hidden states and embeddings."""
    state = prefill(eagle.plan, eagle.params, bench.prompts, capacity=CAPACITY, chunk=CHUNK)
    made = np.asarray(proposals(eagle.plan, eagle.params, state))
    table = np.array(bench.params["embed_tokens"]["embedding"])
    # Gemma's table is scaled on its way into the layers, the draft's rows are not.
    scale = 1.0 if bench.target.position_axes == 3 else table.shape[1] ** 0.5
    for row, prompt in enumerate(bench.prompts):
        features, rows = _features_and_rows(bench.model, prompt)
        known = [int(state.anchor[row])]
        # The likeliest token after the anchor comes first in a chain and in a tree.
        count = 4 if eagle.plan.drafter.top_k == 1 else 1
        for id in made[row, :count]:
            logits = eagle.head.logits(features, rows / scale, table, known)
            # Random logits may nearly tie.
            known_ids = np.isfinite(logits)
            gap = logits.max() - logits[id]
            assert gap <= MODEL * np.abs(logits[known_ids]).max(), f"row {row}, {known}"
            known.append(int(id))


def _features_and_rows(model, prompt):
    taken = []
    hook = model.model.language_model.register_forward_hook(
        lambda module, args, kwargs, out: taken.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    layers = reference.run(model, prompt).layers
    hook.remove()
    features = np.concatenate([layers[index] for index in LAYERS], axis=-1)
    return features, taken[0][0].detach().numpy()


def test_widths_may_change_at_every_step(bench, tree):
    """A tree of which fewer nodes are verified is its best part."""
    rows = (3, 1, 6)
    state = prefill(tree.plan, tree.params, bench.some(*rows), capacity=CAPACITY, chunk=CHUNK)
    whole = np.asarray(proposals(tree.plan, tree.params, state))
    plans = []
    for width in (1, 3, tree.plan.drafter.block):
        plan = dataclasses.replace(tree.plan, drafter=Narrowed(tree.plan.drafter, width))
        made = proposals(plan, tree.params, state)
        np.testing.assert_array_equal(made, whole[:, : width - 1])
        plans.append(plan)
    turn = 0
    while np.any(state.running):
        state, turn = one_step(plans[turn % 3], tree.params, state), turn + 1
    assert answers(state) == [bench.plain[row] for row in rows]


def test_a_row_keeps_its_drafts_in_a_slot(bench, tree):
    """State that `insert` and narrow runs of a few rows carry along is the row's own."""
    assert_state_moves_into_a_slot(tree.plan, tree.params, bench.prompts)


def test_a_kernel_by_name_refuses_drafts_of_a_tree(bench, tree):
    """A choice by name never falls back; "auto" takes the reference."""
    drafter = dataclasses.replace(tree.plan.drafter, kernels="interpret")
    plan = dataclasses.replace(tree.plan, drafter=drafter)
    state = prefill(plan, tree.params, bench.some(0), capacity=CAPACITY, chunk=CHUNK)
    with pytest.raises(ValueError, match=r"block_attention.*tree.*use auto or reference"):
        one_step(plan, tree.params, state)
    auto = dataclasses.replace(drafter, kernels="auto")
    plan = dataclasses.replace(tree.plan, drafter=auto)
    assert int(one_step(plan, tree.params, state).num_tokens[0]) >= 2
