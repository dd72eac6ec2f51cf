"""Which blocks of a row are trained: anchors, labels and weights.

A block at anchor p holds the clean token p and masked slots; slot k is to name token p + k from
features of tokens before p. That is exactly what the draft sees when it serves, because training
runs the serving code over many anchors at once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sample_anchors(
    key: Array, prompt_len: Int[Array, " B"], total_len: Int[Array, " B"], count: int, width: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """`count` distinct anchors a row, among answer tokens that have one after them.

    Rows with fewer candidates get invalid anchors, which must not be trained on.
    """
    place = jnp.arange(width)
    candidate = (place >= prompt_len[:, None]) & (place < total_len[:, None] - 1)
    score = jnp.where(candidate, jax.random.uniform(key, candidate.shape), -1.0)
    best, anchors = jax.lax.top_k(score, count)
    return anchors, best >= 0.0


def labels_and_weights(
    ids: Int[Array, "B S"],
    total_len: Int[Array, " B"],
    anchors: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    *,
    block: int,
    decay: float,
) -> tuple[Int[Array, "B A drafts"], Float[Array, "B A drafts"]]:
    """Label of slot k = 1 .. block - 1 and its weight `exp(-(k - 1) / decay)`; 0 past the end.

    The position weights are equation 4 of the DFlash paper (arXiv 2602.06036).
    """
    slot = jnp.arange(1, block)
    place = anchors[..., None] + slot
    inside = valid[..., None] & (place < total_len[:, None, None])
    flat = jnp.minimum(place, ids.shape[1] - 1).reshape(ids.shape[0], -1)
    labels = jnp.take_along_axis(ids, flat, axis=1).reshape(place.shape)
    return labels, jnp.where(inside, jnp.exp(-(slot - 1) / decay), 0.0)
