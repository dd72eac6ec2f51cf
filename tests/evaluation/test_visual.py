"""Acceptance by visual bucket and correlation, counted by hand."""

import dataclasses

import numpy as np
import pytest

from mmflash_jax.evaluation.visual import (
    bucket_of,
    places_of_steps,
    share_of_top,
    visual_figures,
)
from tests.evaluation.test_acceptance import completion

NAN = float("nan")


def scores(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_places_of_a_block_of_four():
    """Steps of 3, 4 and 1 tokens: the fourth slot of a full step is the target's, untried."""
    places = places_of_steps([completion(3, 4, 1)], [scores(9, 1, 2, 3, 4, 5, 6, 7, 8)])
    assert places.slot.tolist() == [1, 2, 3, 1, 2, 3, 4, 1]
    assert places.step.tolist() == [1, 1, 1, 2, 2, 2, 2, 3]
    assert places.accepted.tolist() == [True, True, False, True, True, True, False, False]
    assert places.tried.tolist() == [True, True, True, True, True, True, False, True]
    # The token of prefill has a score and no place.
    assert places.score.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_answer_that_ends_with_a_draft_has_no_rejection_there():
    places = places_of_steps([completion(2, 2, cut=True), completion(1)], [None, scores(0, 5)])
    assert places.accepted.tolist() == [True, False, True, True, False]
    assert places.tried.all()
    assert places.step.tolist() == [1, 1, 2, 2, 3]
    np.testing.assert_array_equal(places.score, [NAN, NAN, NAN, NAN, 5])


def test_places_after_the_known_ones_have_no_score():
    for known, wanted in ((3, [1, 2, NAN, NAN]), (1, [NAN] * 4), (0, [NAN] * 4)):
        places = places_of_steps([completion(4)], [scores(*range(known))])
        np.testing.assert_array_equal(places.score, wanted)


def test_buckets_are_a_fifth_what_is_zero_and_the_rest():
    bucket, lowest = bucket_of(scores(0, 0.009, 0.02, 3, 0.5, NAN, 5, 0.3, 0.2, 0.1, 0.011))
    assert lowest == 3
    assert bucket.tolist() == ["zero"] * 2 + ["middle", "top", "middle", "", "top"] + ["middle"] * 4
    # More than four fifths are zero: the top fifth is what is left.
    bucket, lowest = bucket_of(scores(0, 0, 0, 0, 0, 0.001, 0, 0, 0, 2))
    assert bucket.tolist() == ["zero"] * 9 + ["top"]
    bucket, lowest = bucket_of(scores(NAN, NAN))
    assert bucket.tolist() == ["", ""]
    assert lowest is None


def test_acceptance_and_tau_by_bucket():
    """Ten scored places, so two are top: 6 and 4.

    place   1    2    3  | 4   5   6    7  | 8    9  | 10
    slot    1    2    3  | 1   2   3    4  | 1    2  | 1
    draft   yes  yes  no | yes yes yes  -  | yes  no | no
    score   0    1    6  | 0   0   2    3  | .5   0  | 4
    """
    answer = completion(3, 4, 2, 1)
    figures = visual_figures([answer], [scores(7, 0, 1, 6, 0, 0, 2, 3, 0.5, 0, 4)])
    assert figures["visual_buckets"] == {
        "zero_below": 0.01,
        "top_from": 4.0,
        "top": {"share": 0.2, "tried": 2, "steps": 1},
        "middle": {"share": 0.4, "tried": 3, "steps": 1},
        "zero": {"share": 0.4, "tried": 4, "steps": 2},
    }
    assert figures["acceptance_by_visual_bucket"] == {"top": 0.0, "middle": 1.0, "zero": 3 / 4}
    # Steps of 3 and 4 tokens began at zero scores, the step of 2 in the middle, that of 1 on top.
    assert figures["tau_by_visual_bucket"] == {"top": 1.0, "middle": 2.0, "zero": 3.5}


def test_the_correlation_of_score_and_rejection():
    """Tried: scores 0 1 6 0 0 2 .5 0 4, rejected 0 0 1 0 0 0 0 1 1.

    Means are 1.5 and 1/3, the sum of products is 10: covariance sum 10 - 9 * 1.5 / 3 = 5.5. Sums of
    squares are 57.25 - 9 * 1.5^2 = 37 and 3 - 9 / 9 = 2.
    Ranks: 2.5 6 9 2.5 2.5 7 5 2.5 8 of mean 5; of rejected ones 9 + 2.5 + 8, so 19.5 - 15 = 4.5.
    Squares of ranks: 280 - 225 = 55.
    """
    figures = visual_figures([completion(3, 4, 2, 1)], [scores(7, 0, 1, 6, 0, 0, 2, 3, 0.5, 0, 4)])
    correlation = figures["rejection_correlation"]
    assert correlation["pearson"] == pytest.approx(5.5 / np.sqrt(37 * 2))
    assert correlation["spearman"] == pytest.approx(4.5 / np.sqrt(55 * 2))


def test_what_cannot_be_said_is_none():
    nothing = {"top": None, "middle": None, "zero": None}
    for answers, known in (
        ([completion(2, 1)], [None]),
        ([completion()], [scores(3)]),
    ):
        figures = visual_figures(answers, known)
        assert figures["acceptance_by_visual_bucket"] == nothing
        assert figures["tau_by_visual_bucket"] == nothing
        assert figures["rejection_correlation"] == {"pearson": None, "spearman": None}
        assert figures["visual_buckets"]["top_from"] is None
    # Nothing is rejected, then nothing varies.
    perfect = dataclasses.replace(completion(4), committed=np.array([0, 0, 0, 1]))
    figures = visual_figures([perfect], [scores(0, 1, 2, 3, 4)])
    assert figures["rejection_correlation"]["pearson"] is None
    figures = visual_figures([completion(2, 1)], [scores(0, 1, 1, 1)])
    assert figures["rejection_correlation"]["spearman"] is None


def test_the_share_of_weight_on_the_top_fifth():
    score = np.array([[NAN, 0, 1, 2, 5], [NAN, 1, 1, NAN, 0]], np.float32)
    weight = np.array([[9, 1, 1, 1, 2], [9, 1, 1, 9, 1]], np.float32)
    # Of seven scored tokens two are top: 5 and 2.
    assert share_of_top(score, weight) == pytest.approx(3 / 8)
    assert share_of_top(np.full(3, NAN), np.ones(3)) is None
