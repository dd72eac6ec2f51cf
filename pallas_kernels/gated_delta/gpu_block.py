"""A step of the gated delta rule over a block of tokens, in two kernels.

`prepare`, a program for every value head of every row, does what needs no state: convolution,
norms, gates, and the small matrices with which the state then enters. `advance`, a program for some
columns of a state, folds the last block in, writes the state and lets the new block read it:

    told = K S;  right = v - k_scale told;  update = inverse right;  out = q_scale Q S + mixed right

Its tiles are turned (columns of the state become rows): 16 tokens are the short side of every
product, and results of one product are a side of the next where they are, in registers.

Products have the accuracy of fp32. Queries, keys and values are rounded to the dtype of the ring
before norms and scales, so in bf16 they go into products as they are, without error, and the other
side in three bf16 parts (two where a `parts` says so). In fp32 a product is three TF32 products.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from pallas_kernels.gated_delta.gpu_inputs import (
    Convolution,
    Part,
    Sizes,
    convolved,
    gates,
    inverse_norm,
    parts_of,
    per_token,
)

# Rows of the scales that `prepare` leaves: of pending keys, new keys, new queries, of the state.
PENDING, KEY, QUERY, FADE = range(4)
OLD_KEYS, KEYS, QUERIES = range(3)
INVERSE, MIXED = range(2)


def parts_for(dtype: Any) -> int:
    """Parts in which an fp32 side of a product goes beside one of `dtype`."""
    return 1 if jnp.dtype(dtype) == jnp.float32 else 3


def _part(x: Array, dtype: Any) -> tuple[Array, Array]:
    """A part of fp32 numbers in `dtype`, and what it leaves of them, without error.

    bf16 is the upper half of fp32; cut off in place of rounded, which takes fewer instructions
    than a conversion, three parts are all of its 24 bits.
    """
    if dtype != jnp.bfloat16:
        part = x.astype(dtype)
        return part, x - part.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    upper = lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)
    part = lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    return part, x - upper


def _split(x: Array, dtype: Any, parts: int) -> list[Array]:
    """`x` as a sum of `parts` arrays of `dtype`, the largest first."""
    found = []
    for _ in range(parts):
        part, x = _part(x, dtype)
        found.append(part)
    return found


def _dot(sizes: Sizes, x: Array, y: Array) -> Array:
    """fp32 product of two sides of one dtype."""
    if x.dtype != jnp.float32:
        return plt.dot(x, y)
    # The interpreter's backends know full fp32 only.
    exact, three = lax.Precision.HIGHEST, lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return plt.dot(x, y, precision=exact if sizes.interpret else three)


def _decay(G: Array, mask: Array) -> Array:
    """exp(G_i - G_j) where `mask[i, j]`, else 0; masked first, above the diagonal it grows."""
    difference = G[:, None] - G[None, :]
    return jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0.0)), 0.0)


def _inverse(sizes: Sizes, A: Array, row: Array, column: Array) -> Array:
    """(I + A)^-1 of a strictly lower triangular `A`, by doubling block sizes."""
    inverse = jnp.where(row == column, 1.0, 0.0)
    width = 1
    while width < sizes.P:
        below = ((row // width) % 2 == 1) & (column // width == row // width - 1)
        part = jnp.where(below, A, 0.0)
        if width > 1:
            part = _dot(sizes, _dot(sizes, inverse, part), inverse)
        inverse -= part
        width *= 2
    return inverse


def _convolved_once(
    sizes: Sizes, source: Convolution, parts: Sequence[Part], length: Array
) -> list[Array]:
    """`convolved` in a loop of one turn, which the compiler cannot know.

    Triton would compute straight-line code in the layout of the product that takes it, of which
    every warp holds all, and run out of registers.
    """
    start = [jnp.zeros((sizes.P, part.width), source.ring.dtype) for part in parts]

    def turn(_: Array, __: list[Array]) -> list[Array]:
        return convolved(sizes, source, parts)

    return lax.fori_loop(0, jnp.minimum(length + 1, 1), turn, start)


def prepare(
    sizes: Sizes, ring_ref: Any, new_ref: Any, kernel_ref: Any, a_ref: Any, b_ref: Any,
    A_log_ref: Any, dt_bias_ref: Any, length_ref: Any, count_ref: Any, pending_ref: Any, G_ref: Any,
    ring_out: Any, G_out: Any, sides_out: Any, scales_out: Any, matrices_out: Any, v_out: Any,
) -> None:  # fmt: skip
    """The program of one value head of one row."""
    P, head = sizes.P, pl.program_id(0) % sizes.value_heads
    length, keep = length_ref[0], pending_ref[0]
    source = Convolution(ring_ref, new_ref, kernel_ref, ring_out)
    parts = parts_of(sizes, head, length, count_ref[0], keep)
    old_keys, q, k, v = _convolved_once(sizes, source, parts, length)
    v_out[...] = v
    # Programs of one key head write the same.
    for place, side in ((OLD_KEYS, old_keys), (KEYS, k), (QUERIES, q)):
        sides_out[place] = side

    index = jnp.arange(P)
    real, kept = index < sizes.T, index < keep
    old = per_token(G_ref, kept)
    last = jnp.sum(jnp.where(index == keep - 1, old, 0.0))
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - old, 0.0)), 0.0)
    q_norm, k_norm = inverse_norm(q) * sizes.kd**-0.5, inverse_norm(k)
    a, b = per_token(a_ref, real), per_token(b_ref, real)
    g, beta = gates(a, b, A_log_ref[0], dt_bias_ref[0], real)

    row = lax.broadcasted_iota(jnp.int32, (P, P), 0)
    column = lax.broadcasted_iota(jnp.int32, (P, P), 1)
    G = jnp.sum(jnp.where(column <= row, g[None, :], 0.0), axis=1)
    scales_out[PENDING] = weight * inverse_norm(old_keys)
    scales_out[KEY], scales_out[QUERY] = jnp.exp(G) * k_norm, jnp.exp(G) * q_norm
    scales_out[FADE] = jnp.broadcast_to(jnp.exp(last), (P,))

    through = _decay(G, column <= row) * k_norm[None, :]
    A = jnp.where(column < row, (beta * k_norm)[:, None] * through * _dot(sizes, k, k.T), 0.0)
    inverse = _inverse(sizes, A, row, column) * beta[None, :]
    mixed = _dot(sizes, q_norm[:, None] * through * _dot(sizes, q, k.T), inverse)
    for place, matrix in ((INVERSE, inverse), (MIXED, mixed)):
        for number, part in enumerate(_split(matrix, q.dtype, matrices_out.shape[1])):
            matrices_out[place, number] = part
    # Last, when every warp has read what stands there.
    plt.store(G_out.at[index], jnp.where(real, G, 0.0), mask=index < sizes.records)


def _add_products(
    sizes: Sizes, parts: int, x: Array, sides: Sequence[Array], totals: Sequence[Array]
) -> list[Array]:
    """`totals` plus fp32 products of `x` in fp32 with exact `sides`."""
    totals = list(totals)
    # One part after the other, so that only one takes registers.
    for _ in range(parts):
        part, x = _part(x, sides[0].dtype)
        for place, side in enumerate(sides):
            totals[place] += _dot(sizes, part, side)
    return totals


def _add_split(sizes: Sizes, x: Sequence[Array], matrices: Any, place: int, total: Array) -> Array:
    """`total` plus the product of `x` with the turned matrix at `place`, both in parts."""
    for order in reversed(range(len(x))):
        for number in range(order + 1):
            total += _dot(sizes, x[order - number], matrices[place, number].T)
    return total


def _turned(first: int, rows: int, columns: int) -> tuple[Array, Array]:
    """Where rows of a matrix are read or written turned, `[columns, rows]`.

    A `.T` of a sum of products would be drawn into the sum by Triton, product by product, each of
    which would then start from zero.
    """
    return first + jnp.arange(rows)[None, :], jnp.arange(columns)[:, None]


def advance(
    sizes: Sizes, parts: int, keys: int, state_ref: Any, update_ref: Any, sides_ref: Any,
    scales_ref: Any, matrices_ref: Any, v_ref: Any, pending_ref: Any, out_ref: Any, state_out: Any,
    update_out: Any,
) -> None:  # fmt: skip
    """The program of some columns of the state of one value head of one row."""
    P, columns = sizes.P, v_ref.shape[-1]
    tokens = _turned(0, P, columns)
    token = lax.broadcasted_iota(jnp.int32, (columns, P), 1)
    records = plt.load(update_ref.at[*tokens], mask=token < pending_ref[0], other=0.0)
    records = records * scales_ref[PENDING][None, :]
    none = jnp.zeros((columns, P), jnp.float32)
    told, asked = none, none
    # Some rows of the state after the other, so that only these take registers.
    for first in range(0, sizes.kd, keys):
        at, some = _turned(first, keys, columns), pl.ds(first, keys)
        state = scales_ref[FADE, 0] * plt.load(state_ref.at[*at])
        old_keys = sides_ref[OLD_KEYS, :, some]
        (state,) = _add_products(sizes, parts, records, [old_keys], [state])
        plt.store(state_out.at[*at], state)
        sides = [sides_ref[KEYS, :, some].T, sides_ref[QUERIES, :, some].T]
        told, asked = _add_products(sizes, parts, state, sides, [told, asked])
    right = plt.load(v_ref.at[*tokens]).astype(jnp.float32) - told * scales_ref[KEY][None, :]
    right = _split(right, v_ref.dtype, matrices_ref.shape[1])
    update = _add_split(sizes, right, matrices_ref, INVERSE, none)
    asked = asked * scales_ref[QUERY][None, :]
    out = _add_split(sizes, right, matrices_ref, MIXED, asked)
    plt.store(update_out.at[*tokens], update, mask=token < sizes.records)
    plt.store(out_ref.at[*tokens], out.astype(out_ref.dtype), mask=token < sizes.T)
