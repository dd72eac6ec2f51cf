"""Weights of answer tokens: mean one, inside the box, one where nothing is known."""

from typing import Any

import numpy as np
import pytest

from mmflash_jax.config_files import build
from mmflash_jax.config_train import VisualConfig
from mmflash_jax.training.token_weights import into_box, supervised_tokens, token_weights
from mmflash_jax.weights.hf_config import ConfigError

IMAGE_ID = 7


def weights(score: Any, confidence: Any = None, supervised: Any = None, **settings: Any):
    score = np.asarray(score, np.float32)
    supervised = np.ones(len(score), bool) if supervised is None else supervised
    return token_weights(score, confidence, supervised, VisualConfig(**settings))


def score_vectors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "one token": np.array([3.0]),
        "two": np.array([0.0, 10.0]),
        "all at the cap": np.full(30, 10.0),
        "one of many": np.eye(1, 400)[0] * 10,
        "all but one": 10 - np.eye(1, 400)[0] * 10,
        "rounding noise": random.uniform(0, 1e-7, 50),
        "sparse": np.where(random.random(200) < 0.1, random.uniform(0, 10, 200), 0),
        **{f"random {n}": random.exponential(random.uniform(0.01, 5), 3 + n) for n in range(40)},
    }


@pytest.mark.parametrize("gate", ["none", "confidence"])
@pytest.mark.parametrize("weighting", ["squash", "groups"])
def test_mean_one_in_the_box(weighting, gate):
    """Check (c)."""
    random = np.random.default_rng(1)
    for strength in (0.3, 2.0, 50.0, 1e6):
        for name, score in score_vectors().items():
            made = weights(
                np.minimum(score, 10), random.random(len(score)),
                weighting=weighting, gate=gate, strength=strength,
            )  # fmt: skip
            assert made.dtype == np.float32
            assert made.mean() == pytest.approx(1, abs=1e-4), name
            assert made.min() >= 0.5 - 1e-6, name
            assert made.max() <= 3 + 1e-6, name


def test_a_box_without_room_is_plain():
    assert weights([0, 1, 9], low=1, high=1) == pytest.approx([1, 1, 1])


def test_the_box_keeps_the_order_and_the_ratio_inside():
    made = into_box(np.array([1.0, 2.0, 2.9, 400.0]), 0.5, 3.0)
    assert made.mean() == pytest.approx(1, abs=1e-9)
    assert list(made) == sorted(made)
    inside = into_box(np.array([1.0, 1.5, 2.0]), 0.5, 3.0)
    np.testing.assert_allclose(inside, np.array([1, 1.5, 2]) / 1.5)


def test_the_formula_where_nothing_is_cut():
    score = np.array([0.0, 0.5, 1.5])
    raw = 1 + 2 * np.array([0, 0.5, 0.75])
    np.testing.assert_allclose(weights(score), raw / raw.mean(), rtol=1e-6)
    sure = np.array([1.0, 0.1, 1.0])
    gated = 1 + 2 * np.array([0, 0.05, 0.75])
    made = weights(score, sure, gate="confidence")
    np.testing.assert_allclose(made, gated / gated.mean(), rtol=1e-6)


@pytest.mark.parametrize("weighting", ["squash", "groups"])
def test_plain_weights_are_exactly_one(weighting):
    """Checks (a) and (b): strength 0, no picture, a picture that shows nothing."""
    score = np.array([0, 3, 9, 0.1])
    assert (weights(score, strength=0.0, weighting=weighting) == 1).all()
    assert (weights(np.zeros(9), weighting=weighting) == 1).all()
    none = token_weights(None, None, np.ones(9, bool), VisualConfig(weighting=weighting))
    assert (none == 1).all()


def test_tokens_that_are_no_labels_do_not_count():
    supervised = np.array([False, True, True, False, True])
    made = weights([10, 0, 2, 10, 0], supervised=supervised)
    assert made[~supervised].tolist() == [1, 1]
    assert made[supervised].mean() == pytest.approx(1, abs=1e-4)
    np.testing.assert_array_equal(made[supervised], weights([0, 2, 0]))
    assert (weights([1, 2], supervised=np.zeros(2, bool)) == 1).all()


def test_groups_hold_half_of_the_mass_each():
    score = np.random.default_rng(2).exponential(1.0, 43)
    made = weights(score, weighting="groups")
    top = np.argsort(-score)[:9]
    assert made[top].sum() == pytest.approx(43 / 2, rel=1e-6)
    assert len(np.unique(made[top])) == 1
    assert len(np.unique(np.delete(made, top))) == 1
    assert made.sum() == pytest.approx(43, rel=1e-6)


def test_the_first_token_and_placeholders_are_no_labels():
    """Check (i)."""
    made = supervised_tokens(np.array([3, IMAGE_ID, 4, IMAGE_ID]), IMAGE_ID)
    assert made.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 1.5}, "visual.low is 1.5, it must be at most 1"),
        ({"high": 0.5}, "visual.high is 0.5, it must be at least 1"),
        ({"tau": 0}, "visual.tau is 0.0, it must be positive"),
        ({"strength": -1}, "visual.strength is -1.0, it must not be negative"),
        ({"ablation": "black"}, "visual.ablation is 'black', allowed: "),
    ],
)
def test_settings_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        build(VisualConfig | None, values, "visual")
