"""A training block sees what the draft sees when it serves, and nothing of what is to come.

A leak would not show in the loss, which would only look too good: the draft would learn to copy
and then accept nothing when it serves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.training.objective import block_loss
from tests.drafts import context_of
from tests.tolerances import LAYER, assert_close
from tests.training import toy

WIDTH = 24
# Overlapping blocks, neighbours, an empty context, and blocks that reach past the row.
ANCHORS = jnp.array([[0, 3, 4, 5, 11, 12, 22], [23, 20, 12, 7, 6, 2, 1]])
TOTAL_LEN = jnp.array([24, 24])


@pytest.mark.parametrize("kind", toy.LAYER_KINDS)
def test_training_logits_are_those_of_serving(kind):
    """Block p of a whole row = the proposal of a draft that absorbed p tokens, piece by piece."""
    plan = toy.drafter(kind)
    params = toy.params_of(plan)
    features, ids = toy.features_and_ids(2, WIDTH)
    trained = np.asarray(toy.training_logits(plan, params, features, ids, TOTAL_LEN, ANCHORS))
    absorb = jax.jit(plan.absorb)
    for a in range(ANCHORS.shape[1]):
        length = ANCHORS[:, a].astype(np.int32)
        state = plan.init_state(2, 32)
        done = np.zeros(2, np.int32)
        while (done < length).any():
            count = np.minimum(length - done, 9)
            # Rows behind the counted ones are a rejected draft's: junk.
            piece = np.full((2, 9, toy.CAPTURED), 1e3, np.float32)
            for row in range(2):
                piece[row, : count[row]] = features[row, done[row] : done[row] + count[row]]
            state = absorb(params, state, context_of(piece, done, count))
            done = done + count
        anchor = ids[np.arange(2), length]
        served = toy.serving_logits(plan, params, state, anchor, length)
        assert_close(trained[:, a], served, LAYER, f"anchors {length}")


@pytest.mark.parametrize("kind", toy.LAYER_KINDS)
@pytest.mark.parametrize("anchor", [1, 6, 13])
def test_the_loss_of_a_block_depends_on_features_before_its_anchor_alone(kind, anchor):
    """By gradient, which is exactly zero where nothing is seen."""
    plan = toy.drafter(kind)
    params = toy.params_of(plan)
    features, ids = toy.features_and_ids(1, WIDTH)
    gradient = _feature_gradient(plan, params, features, ids, jnp.array([[anchor]]))
    size = np.abs(np.asarray(gradient)).max(axis=-1)[0]
    assert (size[anchor:] == 0.0).all()
    # Slot 0 sees itself and the window - 1 tokens before it; no other slot sees further back.
    first = max(0, anchor - toy.WINDOW + 1) if kind == "sliding" else 0
    assert (size[:first] == 0.0).all()
    assert (size[first:anchor] > 0.0).all()


def test_anchors_of_one_row_do_not_see_each_other():
    """Alone or among neighbours closer than a block, a block's logits are the same."""
    plan = toy.drafter()
    params = toy.params_of(plan)
    features, ids = toy.features_and_ids(2, WIDTH)
    together = np.asarray(toy.training_logits(plan, params, features, ids, TOTAL_LEN, ANCHORS))
    for a in (0, 2, 4):
        alone = toy.training_logits(plan, params, features, ids, TOTAL_LEN, ANCHORS[:, a : a + 1])
        assert_close(together[:, a : a + 1], alone, LAYER, f"block {a}")


def test_ids_of_the_row_reach_a_block_as_its_anchor_only():
    """Every later token is a mask: labels are not inputs."""
    plan = toy.drafter()
    params = toy.params_of(plan)
    features, ids = toy.features_and_ids(1, WIDTH)
    anchors = jnp.array([[6]])
    before = toy.training_logits(plan, params, features, ids, TOTAL_LEN[:1], anchors)
    others = (ids + 1) % (toy.VOCAB_SIZE - 1)
    others[0, 6] = ids[0, 6]
    after = toy.training_logits(plan, params, features, others, TOTAL_LEN[:1], anchors)
    np.testing.assert_array_equal(before, after)
    others[0, 6] += 1
    moved = toy.training_logits(plan, params, features, others, TOTAL_LEN[:1], anchors)
    assert np.abs(np.asarray(moved) - np.asarray(before)).max() > 1e-3


def _feature_gradient(plan, params, features, ids, anchors):
    @jax.jit
    @jax.grad
    def gradient(features):
        loss, _ = block_loss(
            plan, params, toy.Recorder().heads, features, ids, jnp.asarray(TOTAL_LEN[:1]), anchors,
            jnp.ones(anchors.shape, bool), toy.SETTINGS,
        )  # fmt: skip
        return loss

    return gradient(features)
