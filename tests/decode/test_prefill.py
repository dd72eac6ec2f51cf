"""Prompts into caches: chunks, images, padding rows, the draft's context."""

import dataclasses

import jax
import numpy as np
import pytest

from mmflash_jax.decode.buckets import bucket, chunk_widths
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import ABSENT
from tests.decode import drafters
from tests.decode.running import CAPACITY, CHUNK, answers, generate, meaning, proposals, walk
from tests.targets import reference
from tests.targets.meaning import assert_same_meaning
from tests.tolerances import MODEL, assert_close


@pytest.mark.parametrize("chunk", [4, 7])
def test_chunk_edges_change_nothing(bench, chunk):
    """A20, B15: chunks end inside images and blocks of text; ids and caches are the same."""
    rows = (3, 1, 1)
    plan, params = bench.dflash()
    prompts = bench.some(*rows)
    whole = prefill(plan, params, prompts, capacity=CAPACITY, chunk=64)
    pieces = prefill(plan, params, prompts, capacity=CAPACITY, chunk=chunk)
    for one, two in zip(meaning(plan, params, pieces), meaning(plan, params, whole), strict=True):
        assert_same_meaning(one, two, "cache")
    # C06 and C07: the draft's context is the whole prompt, also in chunks wider than its window.
    np.testing.assert_array_equal(proposals(plan, params, pieces), proposals(plan, params, whole))
    ids = answers(decode(plan, params, pieces, 10**6))
    assert ids == [bench.plain[row] for row in rows]
    assert ids[1] == ids[2], "two identical prompts"


def test_the_draft_absorbs_every_prompt_token_once(bench):
    """C06, A14: features of the asked layers at every token index, image tokens included."""
    # Rows whose answers hold no image placeholder: transformers would look for its image.
    rows = (1, 3, 5)
    width = 2 * bench.target.config.hidden_size
    script = drafters.oracle(bench.sequences(*rows))
    plan, params = bench.scripted(script, capture=(2, 0), features=width)
    states = walk(plan, params, bench.some(*rows))
    for row, number in enumerate(rows):
        prompt = bench.prompts[number]
        # Generated tokens too: the reference runs over the whole sequence.
        known = np.array(bench.sequences(number)[0][:-1], np.int32)
        later = np.full(len(known) - len(prompt.ids), -1, np.int32)
        media_idx = np.concatenate([prompt.media_idx, later])
        longer = dataclasses.replace(prompt, ids=known, media_idx=media_idx)
        layers = reference.run(bench.model, longer).layers
        wanted = np.concatenate([layers[2], layers[0]], axis=-1)
        start = np.asarray(states[0].draft.features)[row, 0, : len(prompt.ids)]
        assert_close(start, wanted[: len(prompt.ids)], MODEL, "after the prompt")
        end = np.asarray(states[-1].draft.features)[row, 0, : len(known)]
        assert_close(end, wanted, MODEL, "at the end")


def test_padding_rows_carry_nothing(bench):
    """A12: three requests in a batch of four; the fourth row's caches are NaN throughout."""
    rows = (6, 2, 0)
    for plan, params in (
        bench.dflash(),
        bench.scripted(drafters.ragged([[], *bench.sequences(*rows)])),
    ):
        prompts = [None, *bench.some(*rows)]
        state = prefill(plan, params, prompts, capacity=CAPACITY, chunk=CHUNK)

        def poison(x):
            return x.at[0].set(np.nan) if x.dtype == np.float32 else x

        state = dataclasses.replace(
            state,
            cache=jax.tree.map(poison, state.cache),
            draft=jax.tree.map(poison, state.draft),
        )
        state = decode(plan, params, state, 10**6)
        assert answers(state) == [[], *(bench.plain[row] for row in rows)]
        assert state.reason[0] == ABSENT
        assert state.steps[0] == state.length[0] == state.committed[0].sum() == 0
        for row in meaning(plan, params, state)[1:]:
            assert all(np.isfinite(part).all() for part in row)


def test_placeholder_ids_outside_the_vocabulary(bench):
    """B05: neither target nor draft looks a placeholder up."""
    plan, params = bench.dflash()
    prompts = bench.some(2, 3)
    outside = [
        dataclasses.replace(p, ids=np.where(p.media_idx >= 0, 10**6, p.ids).astype(np.int32))
        for p in prompts
    ]
    assert answers(generate(plan, params, outside)) == [bench.plain[2], bench.plain[3]]


def test_host_records_are_left_alone(bench):
    """B03: positions and ids of a prompt serve a second run unchanged."""
    plan, params = bench.dflash()
    prompts = bench.some(3, 6)
    before = jax.tree.map(np.copy, [(p.ids, p.positions, p.media_idx) for p in prompts])
    walk(plan, params, prompts)
    after = [(p.ids, p.positions, p.media_idx) for p in prompts]
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_an_image_changes_the_answer(bench):
    """B01: the same ids with another picture."""
    plan, params = bench.undrafted()
    (prompt,) = bench.some(2)
    (image,) = prompt.images
    other = dataclasses.replace(image, patches=image.patches[::-1].copy())
    ids = answers(generate(plan, params, [dataclasses.replace(prompt, images=(other,))]))
    assert ids[0] != bench.plain[2]


def test_buckets_hold_what_they_are_for():
    for smallest in (16, 32, 64):
        sizes = {bucket(count, smallest) for count in range(1, 4096)}
        assert len(sizes) <= 18
        for count in range(1, 4096):
            size = bucket(count, smallest)
            assert count <= size
            assert size <= max(smallest, 1.5 * count)
    assert chunk_widths(70, widest=32) == [32, 32, 32]
    assert chunk_widths(64, widest=32) == [32, 32]
    assert chunk_widths(300, widest=512) == [384]
    for length in range(1, 700):
        assert length <= sum(chunk_widths(length, widest=128)) < length + 64
