"""One process answers many requests: no memory of earlier ones, no new programs."""

from typing import Any

import numpy as np
import pytest

from mmflash_jax.decode import prefill as prefill_module
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from tests.decode import drafters
from tests.decode.running import CAPACITY, CHUNK, answers, generate
from tests.targets.prompts import make_prompt


def test_the_same_request_five_times_among_others(bench):
    """A18: byte-identical ids and logits' state each time."""
    plan, params = bench.dflash()
    runs = []
    for other in (0, 4, 7, 5, 1):
        state = generate(plan, params, bench.some(2, other, 6))
        runs.append(np.asarray(state.tokens)[[0, 2]].tobytes())
        assert answers(state)[1] == bench.plain[other]
    assert len(set(runs)) == 1


def test_programs_depend_on_buckets_not_on_lengths(bench):
    """Prompts of other lengths, limits, stop places and drafts reuse every compiled program."""
    plan, params = bench.dflash()

    def serve(lengths, limits):
        prompts = [
            make_prompt(bench.target, length, seed=length, max_tokens=limit)
            for length, limit in zip(lengths, limits, strict=True)
        ]
        state = prefill(plan, params, prompts, capacity=CAPACITY, chunk=CHUNK)
        return decode(plan, params, state, 10**6)

    jitted: tuple[Any, ...] = (
        decode,
        prefill_module.prefill_chunk,
        prefill_module.first_token,
        prefill_module.empty_prompts,
    )
    serve([5, 9, 30], [40, 33, 35])
    before = [function._cache_size() for function in jitted]
    serve([31, 1, 32], [1, 48, 2])
    serve([70, 50, 33], [34, 36, 40])
    assert [function._cache_size() for function in jitted] == before


def test_caches_are_donated(bench):
    """The fused loop updates caches in place: its input is gone afterwards."""
    plan, params = bench.scripted(drafters.oracle(bench.sequences(0, 4, 7)))
    state = prefill(plan, params, bench.some(0, 4, 7), capacity=CAPACITY, chunk=CHUNK)
    decode(plan, params, state, 1)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.cache.layers[1].k)
