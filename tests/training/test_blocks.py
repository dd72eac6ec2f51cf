"""Anchors, labels and weights of training blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.training.blocks import (
    default_decay,
    document_starts,
    dpace_weights,
    labels_and_weights,
    sample_anchors,
)

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


@pytest.mark.parametrize(
    ("block", "decay"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (12, 17 / 3), (32, 14.0)]
)
def test_the_default_decay_follows_the_block(block, decay):
    assert default_decay(block) == pytest.approx(decay)


def test_document_starts():
    segments = jnp.array([[5, 5, 5, 2, 5, 5], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 3, 1]])
    wanted = [[0, 0, 0, 3, 4, 4], [0] * 6, [0, 1, 2, 2, 2, 5]]
    assert document_starts(segments).tolist() == wanted


def test_anchors_of_packed_rows_have_a_supervised_token_after_them_in_their_document():
    segments = jnp.array([[1] * 6 + [2] * 6 + [0] * 4])
    # Prompts weigh nothing, nor does the image placeholder at 9; 5 ends its document.
    weight = jnp.array([[0, 0, 1, 1, 1, 1] + [0, 1, 1, 0, 2, 0.5] + [0] * 4], jnp.float32)
    anchors, valid = sample_anchors(
        jax.random.key(0), jnp.array([0]), jnp.array([12]), 16, 16,
        token_weight=weight, segments=segments,
    )  # fmt: skip
    assert sorted(np.asarray(anchors)[np.asarray(valid)].tolist()) == [2, 3, 4, 7, 10]


def test_tokens_without_weight_and_of_other_documents_are_no_labels():
    ids = jnp.arange(16)[None]
    segments = jnp.array([[1] * 6 + [2] * 6 + [0] * 4])
    weight = jnp.ones((1, 16)).at[0, 9].set(0.0)
    _, weights = labels_and_weights(
        ids, jnp.array([12]), jnp.array([[3, 7]]), jnp.array([[True, True]]),
        block=6, decay=2.0, token_weight=5 * weight, segments=segments,
    )  # fmt: skip
    assert (np.asarray(weights[0]) > 0).tolist() == [[1, 1, 0, 0, 0], [1, 0, 1, 1, 0]]
    # How much a token weighs is not in here, and a gap does not shift the positions behind it.
    assert weights[0, 1, 2] == pytest.approx(np.exp(-2 / 2.0))


def test_dpace_by_hand():
    """alpha 0.5: q~ = (1 + q) / 2, and the third slot is not supervised."""
    q = np.array([0.5, 0.2, 0.9, 1.0])
    supervised = jnp.array([True, True, False, True])
    weights = dpace_weights(-jnp.log(q), supervised, 0.5)
    c = [0.75, 0.75 * 0.6, 0.75 * 0.6 * 1.0]
    np.testing.assert_allclose(weights, [sum(c), c[1] + c[2], 0.0, c[2]], rtol=1e-6)


def test_dpace_is_the_gradient_of_the_expected_acceptance():
    """At alpha 0: sum_k weight_k * d log q_k is d (sum_k q_1 ... q_k), exactly."""
    scores = jnp.array([[0.3, -1.0, 2.0, 0.5], [1.0, 0.1, -0.4, 0.9]])
    supervised = jnp.array([[True] * 4, [True, True, True, False]])

    def accepted(scores):
        q = jnp.where(supervised, jax.nn.sigmoid(scores), 1.0)
        return jnp.where(supervised, jnp.cumprod(q, -1), 0.0).sum()

    def weighted(scores):
        loss = -jax.nn.log_sigmoid(scores)
        return (dpace_weights(loss, supervised, 0.0) * loss).sum()

    np.testing.assert_allclose(-jax.grad(weighted)(scores), jax.grad(accepted)(scores), rtol=1e-5)
