"""The draft's loss as a pure function, in memory that does not grow with the number of blocks.

512 blocks of 16 tokens over a vocabulary of 248,320 would make 8 GB of fp32 logits a row, and the
attention scores of five layers over 3,072 tokens 16 GB. So keys and values of the context are
computed once, and everything after them runs over a chunk of blocks at a time, forward and again
(computed anew) in the backward pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from mmflash_jax.config_train import ObjectiveConfig
from mmflash_jax.drafters import DFlash, Eagle3, Heads, Qwen35MTP
from mmflash_jax.layers.schema import Params
from mmflash_jax.training.blocks import (
    at_anchors,
    default_decay,
    document_starts,
    dpace_weights,
    labels_and_weights,
)
from mmflash_jax.training.divergence import kl_divergence

T = TypeVar("T")
Trained = DFlash | Eagle3 | Qwen35MTP
"""Draft methods that can be trained."""

CHUNK_BYTES = 2**30


class Blocks(NamedTuple):
    """Blocks of a batch and what they are to learn; every field begins `[B, A]`.

    first: where the anchor's document begins, in packed rows. ids: what the draft starts from.
    weights: position weight, 0 at slots not supervised. token_weight: the label's own weight.
    """

    anchors: Array
    first: Array | None
    valid: Array
    ids: Array
    labels: Array
    weights: Array
    token_weight: Array


class Sums(NamedTuple):
    """Sums over blocks. Fields of `drafts` values are sums at each slot, the others scalars."""

    loss: Array
    weights: Array
    applied: Array
    raised: Array
    right: Array
    slots: Array
    kept: Array
    blocks: Array


def block_loss(
    drafter: Trained,
    params: Params,
    heads: Heads,
    features: Float[Array, "B S features"],
    ids: Int[Array, "B S"],
    total_len: Int[Array, " B"],
    anchors: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    settings: ObjectiveConfig,
    *,
    rows: Float[Array, "B S D"] | None = None,
    positions: Int[Array, "P B S"] | None = None,
    token_weight: Float[Array, "B S"] | None = None,
    segments: Int[Array, "B S"] | None = None,
    teacher_hidden: Float[Array, "B S D"] | None = None,
    teacher_logits: Callable[[Array], Array] | None = None,
    devices: int = 1,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted mean loss of all drafts of all blocks, and metrics.

    A DFlash block is an anchor and masked slots; a chain's drafts each come after the right tokens,
    with its own hidden states fed back. A chain also needs the `rows` of the target's table and the
    rotary `positions` (`drafters.base.Context`).

    The loss of slot k is multiplied by its position weight and by the label's `token_weight`
    (visual tokens count more). The sum is divided by the sum of position weights of supervised
    slots alone: token weights have mean 1 in a row, so runs of different strength stay comparable,
    and weights of 1 give plain DFlash. A token weight of 0 means "not supervised", as for padding,
    and leaves the divisor too. No gradient flows through any weight.

    `params` may be wider than the draft's dtype: they are rounded to it here, and gradients of
    chunks are summed in the dtype they come in. Pass float32 ones to train in bfloat16.

    The `kl` loss needs the target's hidden states after its final norm and its `logits` function,
    soft cap included. The state at p + k - 1 predicts token p + k. `segments` number the documents
    of packed rows, and `devices` over which rows are split raise the default chunk.

    Metrics: `accuracy` of slots with a label, `accuracy_per_position` of slots 1 ..; `kept`, mean
    number of drafts before the first wrong one (without the bonus token), which acceptance in the
    decode loop should come near; `weight_per_position`, each slot's share of all weight applied;
    `weight_raised`, the share that labels with a token weight over 1 have; `weight_sum`, the
    divisor, by which losses of partial batches are to be weighed.
    """
    if settings.loss == "kl" and (teacher_hidden is None or teacher_logits is None):
        raise ValueError("the kl loss needs teacher_hidden and teacher_logits")
    state = drafter.context_state(_as(params, drafter.dtype), features, rows, positions)
    # Sums over chunks of what these receive as gradients are better made in the wider dtype.
    state = _as(state, "float32")
    blocks = _blocks(drafter, ids, total_len, anchors, valid, settings, token_weight, segments)
    chunk = settings.chunk or chunk_blocks(
        drafter, -(-anchors.shape[0] // devices), ids.shape[1], kl=settings.loss == "kl"
    )

    def sums_of(params: Params, state: Any, part: Blocks) -> Sums:
        params, state = _as(params, drafter.dtype), _as(state, drafter.dtype)
        logits = drafter.block_logits(params, heads, state, part.ids, part.anchors, part.first)
        teacher = None
        if settings.loss == "kl":
            assert teacher_hidden is not None
            assert teacher_logits is not None
            place = part.anchors[..., None] + jnp.arange(drafter.block - 1)
            teacher = teacher_logits(at_anchors(teacher_hidden, place))
        return _sums(logits, teacher, part, settings)

    sums = _over_chunks(sums_of, params, state, blocks, chunk)
    loss = sums.loss / jnp.maximum(sums.weights, 1e-6)
    slots = jnp.maximum(sums.slots, 1)
    applied = jnp.maximum(sums.applied.sum(), 1e-6)
    metrics = {
        "accuracy": sums.right.sum() / jnp.maximum(sums.slots.sum(), 1),
        "accuracy_per_position": sums.right / slots,
        "kept": sums.kept / jnp.maximum(sums.blocks, 1),
        "weight_per_position": sums.applied / applied,
        "weight_raised": sums.raised / applied,
        "weight_sum": sums.weights,
    }
    return loss, metrics


def chunk_blocks(drafter: Trained, rows: int, context: int, *, kl: bool = False) -> int:
    """Blocks of each of `rows` rows whose larger intermediate fits `CHUNK_BYTES` in fp32.

    That is either the logits (twice as many with a teacher's) or the attention scores of all
    layers. The backward pass holds a few arrays of that size, so the peak is a few times as high.
    """
    block = drafter.block
    logits = (block - 1) * drafter.config.vocab_size * (2 if kl else 1)
    scores = drafter.score_rows * (context + block)
    return max(1, CHUNK_BYTES // (4 * rows * max(logits, scores)))


def _blocks(
    drafter: Trained,
    ids: Int[Array, "B S"],
    total_len: Int[Array, " B"],
    anchors: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    settings: ObjectiveConfig,
    token_weight: Float[Array, "B S"] | None,
    segments: Int[Array, "B S"] | None,
) -> Blocks:
    labels, weights = labels_and_weights(
        ids, total_len, anchors, valid,
        block=drafter.block,
        decay=settings.decay or default_decay(drafter.block),
        token_weight=token_weight,
        segments=segments,
    )  # fmt: skip
    ones = jnp.ones(labels.shape, jnp.float32)
    slots = anchors[..., None] + jnp.arange(1, drafter.block)
    return Blocks(
        anchors=anchors,
        first=None if segments is None else at_anchors(document_starts(segments), anchors),
        valid=valid,
        ids=drafter.block_inputs(at_anchors(ids, anchors), labels),
        labels=labels,
        weights=weights,
        token_weight=ones if token_weight is None else at_anchors(token_weight, slots),
    )


def _sums(
    logits: Float[Array, "B A drafts V"],
    teacher: Float[Array, "B A drafts V"] | None,
    part: Blocks,
    settings: ObjectiveConfig,
) -> Sums:
    supervised = part.weights > 0
    # D-PACE asks for the label's own probability, whatever the loss is.
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, part.labels)
    loss = cross_entropy if teacher is None else _divergence(teacher, logits)
    weights = part.weights
    if settings.position == "dpace":
        weights = dpace_weights(cross_entropy, supervised, settings.dpace_alpha)
    applied = weights * part.token_weight
    right = (jnp.argmax(logits, axis=-1) == part.labels) & supervised
    kept = jnp.cumprod(right.astype(jnp.float32), axis=-1).sum(axis=-1)
    return Sums(
        loss=(loss * applied).sum(),
        weights=weights.sum(),
        applied=applied.sum(axis=(0, 1)),
        raised=jnp.where(part.token_weight > 1, applied, 0.0).sum(),
        right=right.sum(axis=(0, 1)),
        slots=supervised.sum(axis=(0, 1)),
        kept=(kept * part.valid).sum(),
        blocks=part.valid.sum(),
    )


def _divergence(teacher: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """KL(teacher || draft) in nats; the teacher gets no gradient."""
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher), axis=-1)
    return kl_divergence(log_p, jax.nn.log_softmax(draft, axis=-1))


def _over_chunks(
    sums_of: Callable[[Params, Any, Blocks], Sums],
    params: Params,
    state: Any,
    blocks: Blocks,
    chunk: int,
) -> Sums:
    """`sums_of` all blocks, `chunk` of each row at once; the last chunk is filled up.

    Chunks divide the blocks of a row and not the rows, so rows may be split over devices. The
    backward pass computes each chunk anew, so that only one chunk's activations exist at a time.
    """
    count = blocks.anchors.shape[1]
    pieces = -(-count // chunk)
    if pieces == 1:
        return sums_of(params, state, blocks)
    # Equal chunks; filling blocks are invalid and weigh nothing.
    size = -(-count // pieces)
    filler = pieces * size - count

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, filler), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], pieces, size, *x.shape[2:]), 1, 0)

    body = jax.checkpoint(sums_of, prevent_cse=False)
    _, sums = jax.lax.scan(
        lambda none, part: (none, body(params, state, part)), None, jax.tree.map(split, blocks)
    )
    return jax.tree.map(lambda x: x.sum(axis=0), sums)


def _as(tree: T, dtype: str) -> T:
    """Every array of `tree` in `dtype`, but integers as they are."""

    def cast(x: Array) -> Array:
        return x.astype(jnp.dtype(dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
