"""What image towers share: the merge-block order of patches and attention inside each image.

In merge-block order patches come block row by block row, and inside a block of `merge` x `merge`
row by row, so that a merged token is a run of `merge^2` patches.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.product import matmul_precision

# Scores alive at once, fp32: 2^28 are 1 GiB. Above it queries are taken in chunks.
MAX_SCORES = 2**28
# Finite, so that an image of no patches (batch padding) gives finite rows.
MASKED = -1e30


def patch_grid(
    P: int, columns: Int[Array, " I"], merge: int
) -> tuple[Int[Array, "I P"], Int[Array, "I P"]]:
    """Row and column of each patch in merge-block order; padding runs on below the image."""
    patch = jnp.arange(P)[None, :]
    # An image of no columns is batch padding: any finite position serves.
    blocks_across = jnp.maximum(columns[:, None] // merge, 1)
    block = patch // merge**2
    row = block // blocks_across * merge + patch % merge**2 // merge
    column = block % blocks_across * merge + patch % merge
    return row, column


def attend(
    q: Float[Array, "I P N H"],
    k: Float[Array, "I P N H"],
    v: Float[Array, "I P N H"],
    key_mask: Bool[Array, "I P"],
    *,
    scale: float,
    max_scores: int | None = None,
) -> Float[Array, "I P N H"]:
    """Softmax attention inside each image; at most `max_scores` scores are alive at once.

    It is MAX_SCORES unless given. Scores are products times `scale`. Softmax runs in fp32; the
    products of fp32 inputs run at the highest precision.
    """
    images, P, N, H = q.shape
    precision = matmul_precision(q.dtype)

    def some(q: Float[Array, "I T N H"]) -> Float[Array, "I T N H"]:
        scores = jnp.einsum(
            "ITNH,IPNH->INTP", q, k, precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(key_mask[:, None, None], scores * scale, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("INTP,IPNH->ITNH", weights, v, precision=precision)

    chunks = math.ceil(images * N * P * P / (max_scores or MAX_SCORES))
    if chunks <= 1:
        return some(q)
    chunk = math.ceil(P / min(chunks, P))
    chunks = math.ceil(P / chunk)
    q = jnp.pad(q, ((0, 0), (0, chunks * chunk - P), (0, 0), (0, 0)))
    mixed = lax.map(some, q.reshape(images, chunks, chunk, N, H).swapaxes(0, 1))
    return mixed.swapaxes(0, 1).reshape(images, chunks * chunk, N, H)[:, :P]
