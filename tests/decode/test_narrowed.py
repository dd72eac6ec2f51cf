"""Blocks of which only a part is verified: the same ids, and widths that change between steps."""

import dataclasses

import numpy as np

from mmflash_jax.decode.prefill import prefill
from mmflash_jax.drafters.narrowed import Narrowed
from tests.decode import drafters
from tests.decode.running import CAPACITY, CHUNK, answers, check, one_step


def test_widths_may_change_at_every_step(bench):
    """Caches laid out for a whole block take narrower ones, drafts accepted or not."""
    rows = (3, 1, 6)
    plan, params = bench.scripted(drafters.ragged(bench.sequences(*rows)))
    prompts = bench.some(*rows)
    plans = {
        width: dataclasses.replace(plan, drafter=Narrowed(plan.drafter, width))
        for width in (1, 3, 8)
    }
    state = prefill(plan, params, prompts, capacity=CAPACITY, chunk=CHUNK)
    random, used = np.random.default_rng(0), set()
    while np.any(state.running):
        width = int(random.choice(list(plans)))
        before = np.asarray(state.num_tokens)
        state = one_step(plans[width], params, state)
        check(plan, prompts, state)
        assert (np.asarray(state.num_tokens) - before <= width).all()
        used.add(width)
    assert used == set(plans)
    assert answers(state) == [bench.plain[row] for row in rows]
