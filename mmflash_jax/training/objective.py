"""The draft's loss as a pure function."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from mmflash_jax.drafters import Heads
from mmflash_jax.drafters.dflash import DFlash, block_ids
from mmflash_jax.layers.schema import Params
from mmflash_jax.training.blocks import labels_and_weights


def block_loss(
    drafter: DFlash,
    params: Params,
    heads: Heads,
    features: Float[Array, "B S features"],
    ids: Int[Array, "B S"],
    total_len: Int[Array, " B"],
    anchors: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    *,
    decay: float,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted mean cross-entropy of all masked slots, and metrics.

    Metrics: `accuracy` of slots with a label; `kept`, mean number of drafts before the first
    wrong one (without the bonus token), which acceptance in the decode loop should come near;
    `weight`, what the loss is divided by, so that losses of several batches can be joined.
    """
    block = drafter.block
    state = drafter.context_state(params, features)
    start = block_ids(jnp.take_along_axis(ids, anchors, axis=1), drafter.config)
    hidden = drafter.denoise(params, state, start, anchors, heads)
    logits = drafter.logits(hidden[:, :, 1:], heads)
    labels, weights = labels_and_weights(ids, total_len, anchors, valid, block=block, decay=decay)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (jnp.argmax(logits, axis=-1) == labels) & (weights > 0)
    kept = jnp.cumprod(right.astype(jnp.float32), axis=-1).sum(axis=-1)
    metrics = {
        "accuracy": right.sum() / jnp.maximum((weights > 0).sum(), 1),
        "kept": (kept * valid).sum() / jnp.maximum(valid.sum(), 1),
        "weight": weights.sum(),
    }
    return (loss * weights).sum() / jnp.maximum(weights.sum(), 1e-6), metrics
