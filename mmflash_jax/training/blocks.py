"""Which blocks of a row are trained: anchors, labels and weights.

A block at anchor p holds the clean token p and masked slots; slot k is to name token p + k from
features of tokens before p. That is exactly what the draft sees when it serves, because training
runs the serving code over many anchors at once. Blocks may overlap: each sees the row's context by
position, and no other block.

A packed row holds several documents, one after the other; `segments` numbers them token by token.
Anchor, context and labels of a block then lie in one document. What is an answer and what a prompt
follows from `token_weight` in such a row: a token of weight 0 is not supervised. Its features must
have been made document by document, since a target's own pass sees the whole row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

PAPER_BLOCKS, PAPER_DECAYS = (8, 10, 16), (4.0, 5.0, 7.0)


def default_decay(block: int) -> float:
    """Decay of the DFlash paper (arXiv 2602.06036) for blocks of 8, 10 and 16 tokens.

    Straight lines between these; in proportion to the nearest beyond them.
    """
    nearest = min(max(block, PAPER_BLOCKS[0]), PAPER_BLOCKS[-1])
    return float(np.interp(nearest, PAPER_BLOCKS, PAPER_DECAYS)) * block / nearest


def document_starts(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Index of the first token of each token's document: where its run of one number begins."""
    place = jnp.arange(segments.shape[1])
    begins = segments != jnp.roll(segments, 1, axis=1)
    return jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


def at_anchors(values: Array, place: Int[Array, "B ..."]) -> Array:
    """`values[b, place[b, ...]]` with indices past the end of the row clipped to it."""
    flat = jnp.clip(place, 0, values.shape[1] - 1).reshape(place.shape[0], -1)
    flat = flat.reshape(*flat.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, flat, axis=1).reshape(*place.shape, *values.shape[2:])


def sample_anchors(
    key: Array,
    prompt_len: Int[Array, " B"],
    total_len: Int[Array, " B"],
    count: int,
    width: int,
    *,
    token_weight: Float[Array, "B S"] | None = None,
    segments: Int[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """`count` distinct anchors a row, among answer tokens that have one after them.

    Both tokens must be supervised and of one document. Rows with fewer candidates get invalid
    anchors, which must not be trained on.
    """
    place = jnp.arange(width)
    supervised = (place >= prompt_len[:, None]) & (place < total_len[:, None])
    if token_weight is not None:
        supervised &= token_weight > 0
    candidate = supervised[:, :-1] & supervised[:, 1:]
    if segments is not None:
        candidate &= segments[:, :-1] == segments[:, 1:]
    candidate = jnp.pad(candidate, ((0, 0), (0, 1)))
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
    token_weight: Float[Array, "B S"] | None = None,
    segments: Int[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B A drafts"], Float[Array, "B A drafts"]]:
    """Label of slot k = 1 .. block - 1 and its weight `exp(-(k - 1) / decay)`.

    The weight is 0 where there is nothing to learn: past the end of the row or of the anchor's
    document, in an invalid block, and at tokens whose own weight is 0. Other values of
    `token_weight` do not enter it. The position weights are equation 4 of the DFlash paper
    (arXiv 2602.06036).
    """
    slot = jnp.arange(1, block)
    place = anchors[..., None] + slot
    inside = valid[..., None] & (place < total_len[:, None, None])
    if segments is not None:
        starts = document_starts(segments)
        inside &= at_anchors(starts, place) == at_anchors(starts, anchors)[..., None]
    if token_weight is not None:
        inside &= at_anchors(token_weight, place) > 0
    return at_anchors(ids, place), jnp.where(inside, jnp.exp(-(slot - 1) / decay), 0.0)


def dpace_weights(
    cross_entropy: Float[Array, "*b drafts"], supervised: Bool[Array, "*b drafts"], alpha: float
) -> Float[Array, "*b drafts"]:
    """Weights of D-PACE (arXiv 2605.18810), without gradient; 0 at slots not supervised.

    With q_k the draft's probability of label k, the expected number of accepted drafts is the sum
    of c_k = q_1 ... q_k, and log q_k contributes to it c_k + c_{k+1} + ...: how likely the block
    is to reach slot k, and how much lies behind it. Products of small probabilities would starve
    late slots of an untrained draft, so each is first lifted to (1 - alpha) q + alpha. A slot that
    is not supervised neither stops the product nor adds a term.
    """
    probability = jnp.exp(-jax.lax.stop_gradient(cross_entropy))
    lifted = jnp.where(supervised, (1 - alpha) * probability + alpha, 1.0)
    reached = jnp.where(supervised, jnp.cumprod(lifted, axis=-1), 0.0)
    behind = jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)
    return jnp.where(supervised, behind, 0.0)
