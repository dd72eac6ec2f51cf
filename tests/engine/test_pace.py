"""The width of drafts follows what pays (C14): measured seconds and accepted drafts decide."""

import numpy as np
import pytest

from mmflash_jax.engine.pace import PROBE_EVERY, Pace
from mmflash_jax.engine.planning import paces

BLOCK = 16
WIDTHS = (1, 4, 8, 16)
VARIANTS = tuple((32, width) for width in WIDTHS)


def committed(width, accept, steps, random):
    """Steps by tokens committed, when each draft is right with the same chance."""
    counts = np.zeros(BLOCK, np.int64)
    for _ in range(steps):
        kept = 0
        while kept < width - 1 and random.random() < accept:
            kept += 1
        counts[kept] += 1
    return counts


def play(pace, accept, seconds, turns, seed=0):
    """Turns of four steps; the widths that were chosen."""
    random, chosen = np.random.default_rng(seed), []
    for _ in range(turns):
        width = pace.width(32)
        chosen.append(width)
        pace.observe(32, width, committed(width, accept, 4, random), seconds[width])
    return chosen


CHEAP = {1: 1.0, 4: 1.05, 8: 1.1, 16: 1.2}
DEAR = {1: 1.0, 4: 2.0, 8: 3.0, 16: 5.0}


@pytest.mark.parametrize(
    ("accept", "seconds", "best"),
    [
        (0.95, CHEAP, 16),
        (0.8, DEAR, 4),
        (0.0, CHEAP, 1),
        (0.3, DEAR, 1),
        (0.7, {1: 1.0, 4: 1.1, 8: 1.6, 16: 3.0}, 4),
    ],
)
def test_the_width_with_the_most_tokens_a_second_wins(accept, seconds, best):
    chosen = play(Pace(VARIANTS, BLOCK), accept, seconds, 400)
    assert chosen[:3] == [16, 16, 16]
    assert set(chosen[:12]) == set(WIDTHS)
    assert np.mean(np.array(chosen[200:]) == best) > 0.9


def test_it_comes_back_when_drafts_are_right_again():
    pace = Pace(VARIANTS, BLOCK)
    assert play(pace, 0.0, CHEAP, 200)[-1] == 1
    assert play(pace, 0.95, CHEAP, 12 * PROBE_EVERY)[-1] == 16


def test_never_much_slower_than_without_drafts():
    """Share of plain speed, trials and probes included."""
    for accept in (0.0, 0.2, 0.5, 0.9):
        random, pace = np.random.default_rng(1), Pace(VARIANTS, BLOCK)
        tokens = time = 0.0
        for _ in range(1000):
            width = pace.width(32)
            counts = committed(width, accept, 4, random)
            pace.observe(32, width, counts, DEAR[width])
            tokens += counts @ (1 + np.arange(BLOCK))
            time += 4 * DEAR[width]
        assert tokens / time > 0.95 / DEAR[1]


def test_the_fewest_rows_that_hold_the_requests():
    pace = Pace(paces(32, BLOCK), BLOCK)
    assert [pace.rows(needed) for needed in (1, 2, 8, 9, 32)] == [1, 8, 8, 32, 32]
    assert paces(1, 1) == ((1, 1),)
    assert paces(8, 4) == ((1, 1), (1, 4), (8, 1), (8, 4))


def test_a_turn_without_a_clock_still_tells_about_drafts():
    pace = Pace(VARIANTS, BLOCK)
    for _ in range(20):
        pace.observe(32, 16, committed(16, 1.0, 4, np.random.default_rng(0)), None)
    assert pace.tau(16) == pytest.approx(16, abs=0.1)
    # Not yet judged: no duration is known.
    assert pace.width(32) == 16
