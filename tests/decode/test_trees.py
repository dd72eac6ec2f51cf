"""Drafted trees: the ids are those of plain decoding, whatever shape and guesses a tree has."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from mmflash_jax.decode.adjust import Adjustment
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import LENGTH, STOP
from mmflash_jax.decode.step import propose
from mmflash_jax.drafters.narrowed import Narrowed
from tests.decode import drafters
from tests.decode.conftest import MAX_TOKENS
from tests.decode.running import CAPACITY, CHUNK, answers, check, generate, meaning, one_step, walk
from tests.decode.test_sampling import plain_answers, with_sampling
from tests.targets.meaning import assert_same_meaning
from tests.targets.trees import branch

ROWS = (6, 1, 2)
BATCHES = [(2,), (6, 1, 2), tuple(range(8))]


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_ids_are_the_plain_ids(bench, rows, right):
    """PARITY for trees that are wrong, partly right, and right everywhere (equal siblings)."""
    plan, params = bench.branching(drafters.branching(bench.sequences(*rows), right=right))
    states = walk(plan, params, bench.some(*rows))
    assert answers(states[-1]) == [bench.plain[row] for row in rows]
    if right == 0.0:
        assert (np.asarray(states[-1].steps) == MAX_TOKENS - 1).all()
    else:
        assert (np.asarray(states[-1].steps) < 0.8 * MAX_TOKENS).all()


one_proposal = jax.jit(propose, static_argnames="plan")


def test_every_step_takes_the_longest_right_branch(bench):
    """Steps, flags and features, against a walk over the proposed tree by hand."""
    script = drafters.branching(bench.sequences(*ROWS), seed=1)
    plan, params = bench.branching(script, capture=(0, 2), features=64)
    prompts = bench.some(*ROWS)
    prompts[1] = bench.some(1, max_tokens=9)[0]
    states = walk(plan, params, prompts)
    taken = set()
    for before, after in itertools.pairwise(states):
        proposal = one_proposal(plan, params, before)
        ids, parents = np.asarray(proposal.ids), np.asarray(proposal.parents)
        for row in np.flatnonzero(before.running):
            old, new = int(before.num_tokens[row]), int(after.num_tokens[row])
            text = bench.plain[ROWS[row]][old:]
            branches = [branch(parents[row], node)[1:] for node in range(8)]
            right = [
                nodes for nodes in branches if ids[row, [n - 1 for n in nodes]].tolist()
                == text[: len(nodes)]
            ]  # fmt: skip
            longest = max(len(nodes) for nodes in right)
            assert new - old == min(longest + 1, prompts[row].max_tokens - old)
            flags = np.asarray(after.drafted)[row, old:new]
            np.testing.assert_array_equal(flags, np.arange(new - old) < longest)
            taken.add(longest)
    assert len(taken) > 3
    # The draft took in the features of the text, not of nodes beside it.
    plan, params = bench.scripted(
        drafters.oracle(bench.sequences(*ROWS)), capture=(0, 2), features=64
    )
    wanted = generate(plan, params, prompts)
    for row, length in enumerate(np.asarray(wanted.length)):
        np.testing.assert_allclose(
            states[-1].draft.features[row, 0, :length], wanted.draft.features[row, 0, :length],
            atol=1e-4,
        )  # fmt: skip


def test_the_cache_at_the_end_is_that_of_plain_decoding(bench):
    plain_plan, plain_params = bench.undrafted()
    plain = generate(plain_plan, plain_params, bench.prompts)
    plan, params = bench.branching(drafters.branching(bench.sequences(*range(8)), seed=2))
    state = generate(plan, params, bench.prompts)
    np.testing.assert_array_equal(state.tokens, plain.tokens)
    wanted = meaning(plain_plan, plain_params, plain)
    for row, got in enumerate(meaning(plan, params, state)):
        assert_same_meaning(got, wanted[row], f"row {row}")


def test_stops_and_limits_cut_a_branch(bench):
    """A01, A02, A03 in trees: the answer ends at its first stop, else at its limit."""
    rows = (0, 2, 1)
    stop_ids = tuple(sorted({bench.plain[0][12], bench.plain[2][6]}))
    script = drafters.branching(bench.sequences(*rows), seed=3, right=0.8)
    plan, params = bench.branching(script, stop_ids=stop_ids)
    prompts = bench.some(*rows)
    prompts[2] = dataclasses.replace(prompts[2], max_tokens=11)
    state = walk(plan, params, prompts)[-1]
    for row, ids in enumerate(answers(state)):
        text = bench.plain[rows[row]][: prompts[row].max_tokens]
        ends = [place for place, token in enumerate(text) if token in stop_ids]
        assert ids == (text[: ends[0] + 1] if ends else text)
        assert state.reason[row] == (STOP if ends else LENGTH)


def test_a_cache_may_be_filled_to_the_last_slot(bench):
    """Nodes whose number lies past the end of the cache are accepted like any."""
    capacity = len(bench.prompts[1].ids) + MAX_TOKENS - 1
    plan, params = bench.branching(drafters.branching(bench.sequences(1, 3), right=1.0))
    state = walk(plan, params, bench.some(1, 3), capacity=capacity)[-1]
    assert answers(state) == [bench.plain[row] for row in (1, 3)]
    assert state.length[0] == capacity


def test_a_seed_draws_the_same_with_trees(bench):
    """PARITY at a temperature: siblings share their place, so they share its noise."""
    prompts = with_sampling(bench.some(6, 1, 2, 0))
    plain = plain_answers(bench, prompts)
    known = [p.ids.tolist() + ids for p, ids in zip(prompts, plain, strict=True)]
    plan, params = bench.branching(drafters.branching(known, seed=4))
    states = walk(plan, params, prompts)
    assert answers(states[-1]) == plain
    assert (np.asarray(states[-1].steps) < 0.8 * MAX_TOKENS).all()


def test_penalties_and_logprobs_follow_the_branch(bench):
    """A node counts what stands above it as said, not its neighbours; log-probabilities are those
    of the accepted nodes."""
    asked = Adjustment(
        presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.3,
        logit_bias=((65, 2.0),),
    )  # fmt: skip
    prompts = bench.some(6, 1, 2, adjustment=asked, logprobs=True)
    plan, params = bench.undrafted()
    wanted = generate(plan, params, prompts)
    assert answers(wanted) != [bench.plain[row] for row in ROWS]
    known = [p.ids.tolist() + ids for p, ids in zip(prompts, answers(wanted), strict=True)]
    plan, params = bench.branching(drafters.branching(known, seed=5))
    got = generate(plan, params, prompts)
    assert answers(got) == answers(wanted)
    assert (np.asarray(got.steps) < 0.8 * MAX_TOKENS).all()
    assert got.adjustments is not None
    assert wanted.adjustments is not None
    np.testing.assert_array_equal(got.adjustments.counts, wanted.adjustments.counts)
    assert got.logprobs is not None
    assert wanted.logprobs is not None
    np.testing.assert_allclose(got.logprobs.chosen, wanted.logprobs.chosen, atol=1e-4)
    np.testing.assert_array_equal(got.logprobs.ids[..., 0], wanted.logprobs.ids[..., 0])


def test_the_first_nodes_of_a_tree_may_be_verified_alone(bench):
    """Widths that change at every step, as a server's pace does."""
    rows = (3, 1, 6)
    plan, params = bench.branching(drafters.branching(bench.sequences(*rows), right=0.8))
    prompts = bench.some(*rows)
    state = prefill(plan, params, prompts, capacity=CAPACITY, chunk=CHUNK)
    widths = itertools.cycle([8, 3, 1, 5])
    while np.any(state.running):
        width = next(widths)
        narrow = dataclasses.replace(plan, drafter=Narrowed(plan.drafter, width))
        before = np.asarray(state.num_tokens)
        state = one_step(narrow, params, state)
        check(plan, prompts, state)
        assert (np.asarray(state.num_tokens) - before <= width).all()
    assert answers(state) == [bench.plain[row] for row in rows]
