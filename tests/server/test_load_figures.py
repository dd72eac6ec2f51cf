"""What `benchmarks.serving` makes of the moments at which text came."""

import numpy as np
import pytest

from benchmarks.serving import decode_rate, figures


def answer(first, turns, every=0.1, tokens=20):
    """The first token, then `tokens` of them every turn."""
    times = first + every * np.arange(turns + 1)
    return np.stack([times, [1] + [tokens] * turns], axis=1)


def test_the_rate_is_that_of_the_time_in_which_all_decode():
    """The second request comes later and makes the first one slower, as prefill does."""
    early = answer(0.0, 10)
    early[5:, 0] += 2.0
    late = answer(2.45, 10)
    # From 2.45 s on both decode, until the first one ends at 3 s: 20 tokens in 0.1 s each.
    assert decode_rate([[early, late]]) == pytest.approx(400.0)
    assert decode_rate([[early, late], [late, early]]) == pytest.approx(400.0)


def test_no_such_time_no_rate():
    assert decode_rate([[answer(0.0, 3), answer(5.0, 3)]]) is None


def test_what_clients_saw():
    seen = figures([[answer(0.5, 10), answer(0.7, 10)]] * 2, 2)
    assert seen["requests"] == 4
    assert seen["tokens"] == 4 * 201
    assert seen["tokens_per_s"] == pytest.approx(2 * 201 / 1.7, abs=0.1)
    assert seen["first_token_ms"]["p50"] == pytest.approx(600.0)
    assert seen["inter_token_ms"]["p95"] == pytest.approx(5.0)
    assert seen["events_per_answer"] == 11
