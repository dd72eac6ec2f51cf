"""Stop ids, limits and full caches are exact wherever in a block they fall."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import extend, prefill
from mmflash_jax.decode.records import LENGTH, RUNNING, STOP
from tests.decode import drafters
from tests.decode.conftest import MAX_TOKENS
from tests.decode.running import CAPACITY, answers, generate, meaning, walk
from tests.targets.meaning import assert_same_meaning

ROWS = (0, 2, 4, 1)
SCRIPTS = {
    "oracle": drafters.oracle,
    "adversarial": drafters.adversarial,
    "ragged 0": lambda sequences: drafters.ragged(sequences, 0),
    "ragged 1": lambda sequences: drafters.ragged(sequences, 1),
}
# Place of the stop in each row's plain answer: at prefill, in a block, late, and for row 1 none.
STOPS = {0: 12, 2: 6, 4: 0}


def until_stop(ids, stop_ids, limit):
    """What plain decoding gives: ids up to the first stop or the limit, and the reason."""
    ids = ids[:limit]
    for place, token in enumerate(ids):
        if token in stop_ids:
            return ids[: place + 1], STOP
    return ids, LENGTH


@pytest.fixture(scope="module")
def stop_ids(bench):
    """A set of several ids, each one the answer of some row."""
    found = {bench.plain[row][place] for row, place in STOPS.items()}
    for row, place in STOPS.items():
        # The chosen token is the first of the set in its row, or the test would say nothing.
        assert until_stop(bench.plain[row], found, MAX_TOKENS)[0] == bench.plain[row][: place + 1]
    return tuple(sorted(found))


@pytest.mark.parametrize("script", SCRIPTS)
def test_answers_end_exactly_at_the_first_stop(bench, stop_ids, script):
    """A01: stop tokens at every place of a block, as first token, several ids in the set. Nothing
    after a stop is returned, counted or in a cache, and ended rows stay as they are (`walk`)."""
    plan, params = bench.scripted(SCRIPTS[script](bench.sequences(*ROWS)), stop_ids=stop_ids)
    state = walk(plan, params, bench.some(*ROWS))[-1]
    for row, got in enumerate(answers(state)):
        wanted, reason = until_stop(bench.plain[ROWS[row]], stop_ids, MAX_TOKENS)
        assert got == wanted
        assert state.reason[row] == reason
    assert not np.asarray(state.tokens)[0, 13:].any()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_stop_and_limit_in_one_block(bench, stop_ids, script, more):
    """A02: a stop inside the limit is a stop, in the last allowed place too; past it, it is not."""
    plan, params = bench.scripted(SCRIPTS[script](bench.sequences(*ROWS)), stop_ids=stop_ids)
    prompts = bench.some(*ROWS)
    for row in (0, 1):
        limit = STOPS[ROWS[row]] + 1 + more
        prompts[row] = dataclasses.replace(prompts[row], max_tokens=limit)
    state = walk(plan, params, prompts)[-1]
    for row in (0, 1):
        wanted = until_stop(bench.plain[ROWS[row]], stop_ids, prompts[row].max_tokens)
        assert (answers(state)[row], int(state.reason[row])) == wanted
        assert state.reason[row] == (LENGTH if more < 0 else STOP)


@pytest.mark.parametrize("limits", [(1, 2, 7, 40), (8, 9, 10, 40)])
def test_limits_are_exact_and_caches_stay_with_the_text(bench, limits):
    """A03: an always right draft of wider blocks; then going on equals never having stopped."""
    plan, params = bench.scripted(drafters.oracle(bench.sequences(*ROWS)))
    prompts = [
        dataclasses.replace(bench.prompts[row], max_tokens=limit)
        for row, limit in zip(ROWS, limits, strict=True)
    ]
    state = walk(plan, params, prompts)[-1]
    assert answers(state) == [bench.plain[r][:n] for r, n in zip(ROWS, limits, strict=True)]
    assert (np.asarray(state.reason) == LENGTH).all()
    # What a later turn would do with the caches: lift the limit and decode on.
    state = dataclasses.replace(
        state,
        limit=jnp.full((4,), MAX_TOKENS),
        reason=jnp.where(state.num_tokens < MAX_TOKENS, RUNNING, LENGTH),
    )
    state = decode(plan, params, state, 10**6)
    assert answers(state) == [bench.plain[row] for row in ROWS]


def test_next_turn_equals_a_cold_run_of_the_same_prefix(bench):
    """A03: the caches after seven tokens mean what a prefill of prompt and answer gives."""
    plan, params = bench.scripted(drafters.oracle(bench.sequences(*ROWS)))
    warm = generate(plan, params, bench.some(*ROWS, max_tokens=7))
    # The last token is known but in no cache.
    longer = [
        extend(dataclasses.replace(bench.prompts[row], max_tokens=MAX_TOKENS - 6), ids[:6])
        for row, ids in zip(ROWS, answers(warm), strict=True)
    ]
    cold = prefill(plan, params, longer, capacity=CAPACITY, chunk=32)
    np.testing.assert_array_equal(cold.anchor, warm.anchor)
    np.testing.assert_array_equal(cold.length, warm.length)
    for row, (one, two) in enumerate(
        zip(meaning(plan, params, warm), meaning(plan, params, cold), strict=True)
    ):
        assert_same_meaning(one, two, f"row {row}")
    assert answers(decode(plan, params, cold, 10**6)) == [bench.plain[row][6:] for row in ROWS]


def test_a_cache_may_be_filled_to_the_last_slot(bench):
    """The last token needs no slot; blocks that reach past the end write nothing there."""
    rows = (1, 3)
    capacity = len(bench.prompts[1].ids) + MAX_TOKENS - 1
    for script in (drafters.oracle, drafters.ragged):
        plan, params = bench.scripted(script(bench.sequences(*rows)))
        state = walk(plan, params, bench.some(*rows), capacity=capacity)[-1]
        assert answers(state) == [bench.plain[row] for row in rows]
        assert state.length[0] == capacity
    with pytest.raises(ValueError, match=r"row 0: 61 prompt tokens and max_tokens 40 .* 99"):
        prefill(plan, params, bench.some(*rows), capacity=capacity - 1)


def test_committed_lengths_around_multiples_of_the_block(bench):
    """A17: blocks of 16; lengths that hit 15, 16, 17, 32 and a chunk edge in every order."""
    rows = (0, 0, 0, 7)
    right = np.full((4, drafters.PLACES), 15)
    right[0, [5, 15, 16, 17]] = [9, 0, 0, 14]  # 5 -> 15 -> 16 -> 17 -> 32
    right[1, [5, 16, 32]] = [10, 15, 0]  # 5 -> 16 -> 32 -> 33
    right[2, [5, 17, 31]] = [11, 13, 0]  # 5 -> 17 -> 31 -> 32
    right[3, [33, 47, 48]] = [13, 0, 0]  # 33 -> 47 -> 48 -> 49
    script = drafters.table(bench.sequences(*rows), right)
    plan, params = bench.scripted(script, block=16)
    states = walk(plan, params, bench.some(*rows))
    visited = [{int(state.length[row]) for state in states} for row in range(4)]
    assert {15, 16, 17, 32} <= visited[0]
    assert {16, 32, 33} <= visited[1]
    assert {17, 31, 32} <= visited[2]
    assert {33, 47, 48, 49} <= visited[3]
    assert answers(states[-1]) == [bench.plain[row] for row in rows]
