"""Drafts that draft token after token in the loop: Qwen3.5's MTP head and Gemma 4's assistant."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import extend, prefill
from mmflash_jax.decode.records import Plan
from mmflash_jax.decode.step import _pick
from mmflash_jax.drafters.narrowed import Narrowed
from mmflash_jax.layers.scores import Scores
from tests.chains import chain_for
from tests.decode import drafters
from tests.decode.running import (
    CAPACITY,
    CHUNK,
    answers,
    assert_state_moves_into_a_slot,
    generate,
    proposals,
    walk,
)
from tests.decode.test_sampling import plain_answers, with_sampling
from tests.drafters import assistant, mtp
from tests.targets import reference
from tests.tolerances import MODEL, assert_close

TOKENS = 4
BATCHES = [(2,), (6, 1, 2), tuple(range(8))]


class Chain(NamedTuple):
    """Plan and parameters with a random chain draft, and its torch model."""

    plan: Plan
    params: dict[str, Any]
    model: Any


@pytest.fixture(scope="module")
def chain(bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    drafter, params, model = chain_for(bench.target, bench.model, bench.folder, folder, TOKENS)
    plan = Plan(bench.target, drafter, ())
    return Chain(plan, {"target": bench.params, "drafter": params}, model)


@pytest.mark.parametrize("rows", BATCHES)
def test_drafted_ids_are_the_plain_ids(bench, chain, rows):
    """PARITY: images, prompts of several chunks, rows of every length."""
    states = walk(chain.plan, chain.params, bench.some(*rows))
    assert answers(states[-1]) == [bench.plain[row] for row in rows]


def test_a_seed_draws_the_same(bench, chain):
    """PARITY at a temperature."""
    prompts = with_sampling(bench.some(6, 1, 2, 0))
    states = walk(chain.plan, chain.params, prompts)
    assert answers(states[-1]) == plain_answers(bench, prompts)


def test_a_draft_of_a_chain_is_picked_for_its_own_place(bench, chain):
    """Number 2 of a chain takes the noise of the third place after the anchor."""
    prompts = with_sampling(bench.some(6, 1, 2, 0))
    state = prefill(chain.plan, chain.params, prompts, capacity=CAPACITY, chunk=CHUNK)
    logits = np.random.default_rng(0).normal(size=(4, TOKENS, 288)).astype(np.float32)
    logits = jax.numpy.asarray(logits)
    together = np.asarray(_pick(chain.plan, state, Scores.of(logits)))
    for place in range(TOKENS):
        one = _pick(chain.plan, state, Scores.of(logits[:, place : place + 1]), place)
        np.testing.assert_array_equal(one[:, 0], together[:, place])
    assert (together[0] != np.asarray(logits)[0].argmax(-1)).any()


def after_ragged_steps(bench, chain, seed):
    """The end of a decode in which a table said how many drafts are right at each step, with the
    chain's own state kept along."""
    rows = range(8)
    script = drafters.ragged(bench.sequences(*rows), seed, most=TOKENS + 1)
    shadowed = drafters.Shadowed(drafters.Scripted(block=TOKENS + 1), chain.plan.drafter)
    plan = dataclasses.replace(chain.plan, drafter=shadowed)
    params = {**chain.params, "drafter": {"script": script, "other": chain.params["drafter"]}}
    state = generate(plan, params, bench.prompts)
    assert answers(state) == [bench.plain[row] for row in rows]
    kept = np.asarray(state.committed).sum(0)
    assert (kept > 0).all(), "every count of accepted drafts occurred"
    return state


@pytest.mark.parametrize("seed", [0, 1])
def test_state_after_rejections_is_that_of_the_known_tokens_at_once(bench, chain, seed):
    """Accepted tokens are redone with the target's hidden states, rejected ones leave nothing:
    keys, values and hidden states equal those of a prompt that holds the answer already."""
    state = after_ragged_steps(bench, chain, seed)
    known = [
        dataclasses.replace(extend(prompt, ids[:-1]), max_tokens=2)
        for prompt, ids in zip(bench.prompts, bench.plain, strict=True)
    ]
    wanted = prefill(chain.plan, chain.params, known, capacity=CAPACITY, chunk=CHUNK)
    np.testing.assert_array_equal(state.anchor, wanted.anchor)
    np.testing.assert_array_equal(state.length, wanted.length)
    for row, length in enumerate(np.asarray(state.length)):
        assert_close(state.draft.hidden[row], wanted.draft.hidden[row], MODEL, f"hidden of {row}")
        if hasattr(state.draft, "cache"):
            for name in ("k", "v"):
                got, right = (getattr(s.draft.cache, name)[row] for s in (state, wanted))
                assert_close(got[:, : length - 1], right[:, : length - 1], MODEL, f"{name} {row}")
    if hasattr(state.draft, "positions"):
        np.testing.assert_array_equal(state.draft.positions, wanted.draft.positions)
    np.testing.assert_array_equal(
        proposals(chain.plan, chain.params, state), proposals(chain.plan, chain.params, wanted)
    )


def test_chains_after_a_prompt_are_those_of_the_reference(bench, chain):
    """The whole way from a prompt with images to drafts, against transformers' target and a torch
    draft that runs on its hidden states."""
    state = prefill(chain.plan, chain.params, bench.prompts, capacity=CAPACITY, chunk=CHUNK)
    made = np.asarray(proposals(chain.plan, chain.params, state))
    for row, prompt in enumerate(bench.prompts):
        anchor = int(state.anchor[row])
        by_family = _assistant if prompt.positions.shape[0] == 1 else _head
        logits, wanted = by_family(bench, chain, prompt, anchor)
        for place, (ours, theirs) in enumerate(zip(made[row], wanted, strict=True)):
            # Random logits may nearly tie.
            gap = float(logits[place][theirs] - logits[place][ours])
            assert gap <= MODEL * float(np.abs(logits[place]).max()), f"row {row}, draft {place}"
            if ours != theirs:
                break


def _assistant(bench, chain, prompt, anchor):
    with torch.no_grad():
        out = bench.model.model(
            **reference.inputs(bench.model, prompt), return_shared_kv_states=True
        )
        table = bench.model.model.language_model.embed_tokens(torch.arange(288))
    logits, ids = assistant.chain_logits(
        chain.model, table, anchor, out.last_hidden_state[0, -1], out.shared_kv_states,
        len(prompt.ids), TOKENS,
    )  # fmt: skip
    return logits.numpy(), ids


def _head(bench, chain, prompt, anchor):
    taken = []
    hook = bench.model.model.language_model.register_forward_hook(
        lambda module, args, kwargs, out: taken.append((kwargs, out)), with_kwargs=True
    )
    with torch.no_grad():
        bench.model(**reference.inputs(bench.model, prompt))
    hook.remove()
    kwargs, out = taken[0]
    table, head = (
        np.array(bench.params[name]["embedding"]) for name in ("embed_tokens", "lm_head")
    )
    return mtp.chain_logits(
        chain.model, table, head, anchor, out.last_hidden_state[0].numpy(),
        kwargs["inputs_embeds"][0].numpy(), prompt.positions, len(prompt.ids) + prompt.rope_shift,
        TOKENS,
    )  # fmt: skip


def test_narrowed_chains_draft_less(bench, chain):
    """Widths change between steps; a narrow step runs the head as often as it must."""
    rows = (3, 1, 6)
    state = prefill(chain.plan, chain.params, bench.some(*rows), capacity=CAPACITY, chunk=CHUNK)
    whole = np.asarray(proposals(chain.plan, chain.params, state))
    counts = {}
    for width in (1, 3, TOKENS + 1):
        plan = dataclasses.replace(chain.plan, drafter=Narrowed(chain.plan.drafter, width))
        np.testing.assert_array_equal(proposals(plan, chain.params, state), whole[:, : width - 1])
        counts[width] = plan
    turn = 0
    while np.any(state.running):
        plan = list(counts.values())[turn % 3]
        state, turn = decode(plan, chain.params, state, 1), turn + 1
    assert answers(state) == [bench.plain[row] for row in rows]


def test_a_row_keeps_its_chain_in_a_slot(bench, chain):
    """State that `insert` and narrow runs of a few rows carry along is the row's own."""
    assert_state_moves_into_a_slot(chain.plan, chain.params, bench.prompts)
