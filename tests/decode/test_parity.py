"""Drafted ids equal plain ids equal transformers' greedy ids, whatever the drafter proposes."""

import itertools

import jax
import numpy as np
import pytest

from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import LENGTH
from tests.decode import drafters
from tests.decode.conftest import MAX_TOKENS
from tests.decode.running import CAPACITY, CHUNK, answers, generate, meaning, proposals, walk
from tests.targets import reference
from tests.targets.meaning import assert_same_meaning

# Rows of PARTS: text, one image and three images alone, then ragged batches.
BATCHES = [(1,), (2,), (3,), (0, 7, 4), (6, 1, 2), tuple(range(8))]
SCRIPTS = {
    "oracle": drafters.oracle,
    "adversarial": drafters.adversarial,
    "random": drafters.random,
    "ragged": drafters.ragged,
}


def test_plain_ids_are_those_of_transformers(bench):
    for row, prompt in enumerate(bench.prompts):
        wanted = reference.generate(bench.model, prompt, MAX_TOKENS)
        assert bench.plain[row] == wanted, f"row {row}"


def test_a_row_alone_gives_its_ids(bench):
    plan, params = bench.undrafted()
    states = walk(plan, params, bench.some(2, max_tokens=12))
    assert answers(states[-1]) == [bench.plain[2][:12]]


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_drafted_ids_are_the_plain_ids(bench, script, rows):
    """PARITY, A09, A10, A11, B13: each row has its own length, images and acceptance."""
    plan, params = bench.scripted(SCRIPTS[script](bench.sequences(*rows)))
    states = walk(plan, params, bench.some(*rows))
    assert answers(states[-1]) == [bench.plain[row] for row in rows]
    # B02: acceptance does not depend on images; the table goes by plain token index.
    steps = {"oracle": -(-(MAX_TOKENS - 1) // 8), "adversarial": MAX_TOKENS - 1}
    if script in steps:
        assert (np.asarray(states[-1].steps) == steps[script]).all()


@pytest.mark.parametrize("rows", BATCHES)
def test_dflash_ids_are_the_plain_ids(bench, rows):
    plan, params = bench.dflash()
    states = walk(plan, params, bench.some(*rows))
    assert answers(states[-1]) == [bench.plain[row] for row in rows]


def test_fused_loop_is_the_steps_one_by_one(bench):
    """Same state to the last field, also when the loop pauses in between."""
    rows = (6, 1, 2)
    plan, params = bench.scripted(drafters.ragged(bench.sequences(*rows)))
    prompts = bench.some(*rows)
    prompts[1] = bench.some(1, max_tokens=9)[0]
    wanted = walk(plan, params, prompts)[-1]
    whole = generate(plan, params, prompts)
    paused = prefill(plan, params, prompts, capacity=CAPACITY, chunk=CHUNK)
    while np.any(paused.running):
        paused = decode(plan, params, paused, 2)
    for got in (whole, paused):
        for name in ("tokens", "num_tokens", "reason", "steps", "committed", "anchor", "length"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), err_msg=name)
    for one, two in zip(meaning(plan, params, whole), meaning(plan, params, wanted), strict=True):
        assert_same_meaning(one, two, "cache")


def test_flags_say_which_tokens_are_drafts(bench):
    """Compared with what the drafter proposes at every step, also where a limit cuts a block."""
    rows = (6, 1, 2)
    plan, params = bench.scripted(drafters.ragged(bench.sequences(*rows)))
    prompts = bench.some(*rows)
    prompts[1] = bench.some(1, max_tokens=9)[0]
    states = walk(plan, params, prompts)
    for before, after in itertools.pairwise(states):
        proposed = np.asarray(proposals(plan, params, before))
        for row in range(len(rows)):
            old, new = int(before.num_tokens[row]), int(after.num_tokens[row])
            said = np.asarray(after.tokens)[row, old:new]
            same = proposed[row, : new - old] == said[: proposed.shape[1]]
            kept = np.cumprod(np.append(same, False))[: new - old].astype(bool)
            np.testing.assert_array_equal(np.asarray(after.drafted)[row, old:new], kept)
    assert np.asarray(states[-1].drafted).any()


def test_state_after_rejections_is_that_of_plain_decoding(bench):
    """A15: drafts wrong at chosen places; delta-net state, convolution rows, keys and values at
    the end equal those of a decode that never saw a rejected token."""
    rows = range(8)
    plain_plan, plain_params = bench.undrafted()
    plain = generate(plain_plan, plain_params, bench.prompts)
    wanted = meaning(plain_plan, plain_params, plain)
    for seed in (0, 1):
        plan, params = bench.scripted(drafters.ragged(bench.sequences(*rows), seed))
        state = generate(plan, params, bench.prompts)
        np.testing.assert_array_equal(state.tokens, plain.tokens)
        for row, got in enumerate(meaning(plan, params, state)):
            assert_same_meaning(got, wanted[row], f"row {row}")


@pytest.mark.parametrize("rows", [(2, 0, 3, 5), tuple(range(8))])
def test_a_row_drafts_and_accepts_the_same_at_any_batch_size(bench, rows):
    """A13: the DFlash proposals of a request, step by step, alone and among others."""
    plan, params = bench.dflash()
    alone = walk(plan, params, bench.some(2))
    together = walk(plan, params, bench.some(*rows))
    place = rows.index(2)
    for one, many in zip(alone, together, strict=False):
        drafted = np.asarray(proposals(plan, params, many))[place]
        np.testing.assert_array_equal(drafted, proposals(plan, params, one)[0])
    np.testing.assert_array_equal(together[-1].committed[place], alone[-1].committed[0])


@pytest.mark.parametrize("rows", [(2,), (2, 0, 3, 5), tuple(range(8))])
def test_acceptance_follows_the_script_at_any_batch_size(bench, rows):
    """A13: accepted counts of one request with the same table in any company."""
    script = drafters.ragged(bench.sequences(*range(8)), seed=3)
    script = jax.tree.map(lambda x: x[list(rows)], script)
    plan, params = bench.scripted(script)
    state = generate(plan, params, bench.some(*rows))
    place = rows.index(2)
    first, right = len(bench.prompts[2].ids), script["right"][place]
    counts, length = np.zeros(8, int), first
    while length < first + MAX_TOKENS - 1:
        count = min(right[length] + 1, first + MAX_TOKENS - 1 - length)
        counts[count - 1] += 1
        length += count
    np.testing.assert_array_equal(state.committed[place], counts)
    assert (np.asarray(state.reason) == LENGTH).all()
