"""Acceptance figures on counts made by hand."""

import numpy as np
import pytest

from mmflash_jax.engine.offline import Completion, Timing
from mmflash_jax.evaluation.acceptance import accepted_per_position, pooled_tau


def completion(*counts: int, block: int = 4, cut: bool = False) -> Completion:
    """An answer whose verify steps committed `counts` tokens, after the one of prefill.

    cut: the answer's last token is a draft.
    """
    drafted = [False, *(slot + 1 < count for count in counts for slot in range(count))]
    drafted[-1] = cut
    return Completion(
        token_ids=tuple(range(1 + sum(counts))),
        finish_reason="stop",
        prompt_tokens=5,
        steps=len(counts),
        committed=np.bincount(np.array(counts, int) - 1, minlength=block),
        drafted=np.array(drafted),
    )


def test_tau_is_pooled_over_steps_and_not_averaged_over_answers():
    answers = [completion(4, 4), completion(1, 1, 1, 1)]
    assert [answer.tau for answer in answers] == [4.0, 1.0]
    assert pooled_tau(answers) == 12 / 6


def test_shares_count_the_steps_that_kept_at_least_k_drafts():
    answers = [completion(1, 2, 4), completion(3)]
    # 0, 1, 3 and 2 drafts stayed.
    assert accepted_per_position(answers) == [3 / 4, 2 / 4, 1 / 4]


@pytest.mark.parametrize("seed", range(3))
def test_tau_is_one_more_than_the_sum_of_shares(seed):
    random = np.random.default_rng(seed)
    answers = [completion(*random.integers(1, 17, n), block=16) for n in (1, 9, 30)]
    shares = accepted_per_position(answers)
    assert len(shares) == 15
    assert pooled_tau(answers) == pytest.approx(1 + sum(shares))


def test_answers_without_a_verify_step():
    assert completion().tau is None
    assert pooled_tau([completion(), completion()]) is None
    assert accepted_per_position([completion()]) == [0.0, 0.0, 0.0]
    # They do not pull the others down.
    assert pooled_tau([completion(), completion(3)]) == 3.0


def test_plain_decoding_has_no_positions():
    answers = [completion(1, 1, block=1)]
    assert accepted_per_position(answers) == []
    assert pooled_tau(answers) == 1.0


def test_speed_without_any_time_is_zero():
    assert Timing().tokens_per_s == 0.0
    assert Timing(decode_s=2.0, tokens=10).tokens_per_s == 5.0
