"""The loss against a loop over slots in numpy, its edge cases and its gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.drafters import Heads
from mmflash_jax.training.objective import block_loss, chunk_blocks
from tests.tolerances import LAYER, assert_close
from tests.training import toy

WIDTH = 24
PLAN = toy.drafter()
PARAMS = toy.params_of(PLAN)
FEATURES, IDS = toy.features_and_ids(2, WIDTH)
TOTAL_LEN = jnp.array([24, 11])
ANCHORS = jnp.array([[3, 9, 20, 22], [2, 9, 0, 1]])
VALID = jnp.array([[True, True, True, True], [True, True, False, False]])


@jax.jit
def loss_of(params: Any, anchors: Any, valid: Any) -> tuple[Any, dict[str, Any]]:
    return block_loss(
        PLAN, params, toy.Recorder().heads, jnp.asarray(FEATURES), jnp.asarray(IDS), TOTAL_LEN,
        anchors, valid, toy.SETTINGS,
    )  # fmt: skip


gradient_of = jax.jit(jax.value_and_grad(lambda *a: loss_of(*a)[0]))


def test_loss_and_metrics_by_hand():
    logits = np.asarray(
        toy.training_logits(PLAN, PARAMS, FEATURES, IDS, TOTAL_LEN, ANCHORS), np.float64
    )
    total = weights = right = slots = 0.0
    kept = []
    for row, a in np.ndindex(2, 4):
        if not VALID[row, a]:
            continue
        alive, kept_here = True, 0
        for k in range(1, toy.BLOCK):
            place = int(ANCHORS[row, a]) + k
            if place >= TOTAL_LEN[row]:
                break
            scores, label = logits[row, a, k - 1], IDS[row, place]
            weight = np.exp(-(k - 1) / toy.DECAY)
            total += weight * (np.log(np.exp(scores).sum()) - scores[label])
            weights += weight
            slots += 1
            hit = scores.argmax() == label
            right += hit
            alive = alive and hit
            kept_here += alive
        kept.append(kept_here)
    loss, metrics = loss_of(PARAMS, ANCHORS, VALID)
    assert loss == pytest.approx(total / weights, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(right / slots)
    assert metrics["kept"] == pytest.approx(np.mean(kept))


@pytest.mark.parametrize("wrong_from", [None, 3])
def test_a_draft_that_knows_the_labels(wrong_from):
    """D02: labels are the tokens at anchor + k, so a head that shouts them has no loss.

    From slot `wrong_from` on it shouts other tokens, and all later slots count for nothing.
    """
    place = jnp.minimum(ANCHORS[..., None] + jnp.arange(1, toy.BLOCK), WIDTH - 1)
    labels = jnp.stack([jnp.asarray(IDS)[row, place[row]] for row in range(2)])
    if wrong_from:
        slots = jnp.arange(1, toy.BLOCK)
        labels = jnp.where(slots == wrong_from, (labels + 1) % toy.VOCAB_SIZE, labels)
    perfect = 100.0 * jax.nn.one_hot(labels, toy.VOCAB_SIZE)
    heads = Heads(embed=toy.Recorder().heads.embed, logits=lambda _: perfect)
    loss, metrics = jax.jit(
        lambda params: block_loss(
            PLAN, params, heads, jnp.asarray(FEATURES), jnp.asarray(IDS), TOTAL_LEN, ANCHORS,
            VALID, toy.SETTINGS,
        )
    )(PARAMS)  # fmt: skip
    # Labels there are: 7, 7, 3, 1 in the first row and 7, 1 in the second.
    if wrong_from is None:
        assert loss == pytest.approx(0.0, abs=1e-6)
        assert metrics["accuracy"] == 1.0
        assert metrics["kept"] == pytest.approx(26 / 6)
    else:
        assert loss > 1.0
        assert metrics["accuracy"] == pytest.approx(22 / 26)
        assert metrics["kept"] == pytest.approx((2 + 2 + 2 + 1 + 2 + 1) / 6)


def test_blocks_that_are_not_trained_give_no_gradient():
    """D01: rows with fewer answer tokens than anchors; where such a block lies does not matter."""
    value, gradient = gradient_of(PARAMS, ANCHORS, VALID)
    elsewhere = jnp.where(VALID, ANCHORS, jnp.array([[0] * 4, [17, 23, 5, 12]]))
    value_2, gradient_2 = gradient_of(PARAMS, elsewhere, VALID)
    assert np.isfinite(value)
    np.testing.assert_array_equal(value, value_2)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_2), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


def test_a_batch_without_any_block_has_no_loss_and_no_gradient():
    value, gradient = gradient_of(PARAMS, ANCHORS, jnp.zeros_like(VALID))
    assert value == 0.0
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, 0.0)


def test_rows_of_very_different_length_weigh_by_their_slots():
    """A short row beside a long one adds its own slots, no more."""
    value, together = gradient_of(PARAMS, ANCHORS, VALID)
    value_1, one = gradient_of(PARAMS, ANCHORS, VALID.at[1].set(False))
    value_2, two = gradient_of(PARAMS, ANCHORS, VALID.at[0].set(False))
    slot = np.exp(-np.arange(toy.BLOCK - 1) / toy.DECAY)
    w1, w2 = 2 * slot.sum() + slot[:3].sum() + slot[0], slot.sum() + slot[0]
    mean = (w1 * float(value_1) + w2 * float(value_2)) / (w1 + w2)
    assert float(value) == pytest.approx(mean, rel=1e-5)
    for a, b, c in zip(*(jax.tree.leaves(g) for g in (together, one, two)), strict=True):
        assert_close(a, (w1 * np.asarray(b) + w2 * np.asarray(c)) / (w1 + w2), 10 * LAYER)


def test_gradients_reach_every_parameter():
    _, gradient = gradient_of(PARAMS, ANCHORS, VALID)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert float(jnp.abs(leaf).max()) > 0.0, jax.tree_util.keystr(path)


def test_loss_and_gradients_with_the_attention_kernel():
    """Full and sliding layers, two documents in a row; the kernel never holds scores, so a chunk is
    as long as its logits allow."""
    kernel = dataclasses.replace(PLAN, kernels="interpret")
    segments = jnp.asarray([[0] * 8 + [1] * 16, [0] * 11 + [1] * 13])

    def loss(plan: Any, params: Any) -> jax.Array:
        return block_loss(
            plan, params, toy.Recorder().heads, jnp.asarray(FEATURES), jnp.asarray(IDS), TOTAL_LEN,
            ANCHORS, VALID, toy.SETTINGS, segments=segments,
        )[0]  # fmt: skip

    (ours, gradients), (theirs, wanted) = (
        jax.jit(jax.value_and_grad(functools.partial(loss, plan)))(PARAMS)
        for plan in (kernel, PLAN)
    )
    assert ours == pytest.approx(float(theirs), rel=1e-5)
    jax.tree.map(functools.partial(assert_close, tolerance=LAYER), gradients, wanted)
    assert chunk_blocks(kernel, 2, 4096) > chunk_blocks(PLAN, 2, 4096)
