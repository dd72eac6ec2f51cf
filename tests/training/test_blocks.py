"""Anchors, labels and weights of training blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.training.blocks import labels_and_weights, sample_anchors

PROMPT_LEN = jnp.array([3, 10, 4, 19])
TOTAL_LEN = jnp.array([20, 12, 5, 20])
WIDTH = 20


def draw(seed: int, count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    anchors, valid = sample_anchors(jax.random.key(seed), PROMPT_LEN, TOTAL_LEN, count, WIDTH)
    return np.asarray(anchors), np.asarray(valid)


@pytest.mark.parametrize("seed", range(5))
def test_anchors_are_distinct_answer_tokens_with_one_after_them(seed):
    anchors, valid = draw(seed)
    # 16, 1, 0 and 0 answer tokens have a successor: a last token can be a label, not an anchor.
    assert valid.sum(axis=1).tolist() == [8, 1, 0, 0]
    for row in range(len(anchors)):
        mine = anchors[row][valid[row]]
        assert len(set(mine.tolist())) == len(mine)
        assert (mine >= PROMPT_LEN[row]).all()
        assert (mine < TOTAL_LEN[row] - 1).all()
    # Places that are not trained on lie inside the row all the same.
    assert ((anchors >= 0) & (anchors < WIDTH)).all()


def test_every_candidate_is_drawn_and_draws_differ():
    seen = [set(draw(seed)[0][0].tolist()) for seed in range(12)]
    assert set().union(*seen) == set(range(3, 19))
    assert len({frozenset(draws) for draws in seen}) > 6


def test_as_many_anchors_as_the_row_is_wide():
    anchors, valid = draw(0, count=WIDTH)
    assert valid.sum(axis=1).tolist() == [16, 1, 0, 0]
    assert set(anchors[0][valid[0]].tolist()) == set(range(3, 19))


def test_the_label_of_slot_k_is_the_token_at_anchor_plus_k():
    random = np.random.default_rng(0)
    ids = jnp.asarray(random.integers(0, 99, (2, WIDTH)))
    total = jnp.array([20, 9])
    anchors = jnp.array([[3, 17, 0], [2, 7, 5]])
    valid = jnp.array([[True, True, False], [True, True, True]])
    labels, weights = labels_and_weights(ids, total, anchors, valid, block=6, decay=2.0)
    assert labels.shape == weights.shape == (2, 3, 5)
    for row, a, slot in np.ndindex(2, 3, 5):
        k = slot + 1
        place = anchors[row, a] + k
        if valid[row, a] and place < total[row]:
            assert labels[row, a, slot] == ids[row, place]
            assert weights[row, a, slot] == pytest.approx(np.exp(-(k - 1) / 2.0))
        else:
            assert weights[row, a, slot] == 0.0


def test_weights_of_the_paper():
    """Equation 4 with gamma 7 and a block of 16 (dflash paper, arXiv 2602.06036)."""
    ids = jnp.zeros((1, 40), int)
    one = jnp.ones((1, 1), int)
    _, weights = labels_and_weights(ids, jnp.array([40]), one, one > 0, block=16, decay=7.0)
    stated = [
        1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180,
        0.156, 0.135,
    ]  # fmt: skip
    np.testing.assert_allclose(weights[0, 0], stated, atol=5e-4)
