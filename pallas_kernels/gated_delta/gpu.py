"""A step of the gated delta rule as a Pallas kernel for NVIDIA GPUs (Triton backend).

A program takes one value head of one batch row. Its state is in registers while the last block is
folded in, written, and read by the new block. States and blocks are turned
(columns of the state become rows): 16 tokens are the short side of every product, and Triton gives
a row of a product to one warp.

Every product has the accuracy of fp32 (one TF32 product would cost three digits of the state).
Queries and keys are rounded to the dtype of the ring before they are normalised, so in bf16 they go
into products as they are, without error, the other side in three bf16 parts; norms follow after.
Other products run as three TF32 products.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

# The smallest side of a tensor-core product.
LEAST = 16


def obstacle(a: Array, state: Array, update: Array) -> str | None:
    """Why the kernel cannot take these arguments."""
    for name, width in zip(("key", "value"), state.shape[2:], strict=True):
        if width < LEAST or width & (width - 1):
            return f"{name} width {width} is no power of two from {LEAST} on"
    if a.shape[1] != update.shape[2]:
        return f"a block of {a.shape[1]} tokens follows one of {update.shape[2]}"
    return None


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """T tokens padded to P rows."""

    T: int
    P: int
    taps: int
    slots: int
    key_heads: int
    value_heads: int
    kd: int
    vd: int
    interpret: bool


def _dots(sizes: _Sizes, x: Array, *sides: Array) -> list[Array]:
    """fp32 products of `[m, k]` in fp32 with `[k, n]` in the ring's dtype or fp32."""
    if sizes.P == 1:
        wide = [y.astype(jnp.float32).reshape(1, x.shape[1]) for y in sides]
        return [jnp.sum(x * y, axis=1)[:, None] for y in wide]
    if sides[0].dtype == jnp.float32:
        # The interpreter's backends know full fp32 only.
        exact, three = lax.Precision.HIGHEST, lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return [plt.dot(x, y, precision=exact if sizes.interpret else three) for y in sides]
    totals = [jnp.zeros((), jnp.float32)] * len(sides)
    # One part after the other, so that only one takes registers.
    for _ in range(3):
        part = x.astype(sides[0].dtype)
        totals = [total + plt.dot(part, y) for total, y in zip(totals, sides, strict=True)]
        x = x - part.astype(jnp.float32)
    return totals


def _dot(sizes: _Sizes, x: Array, y: Array) -> Array:
    """`_dots` with one other side."""
    if x.shape[1] == 1:
        return x * y.astype(jnp.float32)
    return _dots(sizes, x, y)[0]


def _gram(sizes: _Sizes, x: Array, y: Array) -> Array:
    """fp32 products of the rows of two `[P, k]` in the ring's dtype."""
    if sizes.P == 1:
        product = jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1)
        return product[:, None]
    if x.dtype == jnp.float32:
        return _dot(sizes, x, y.T)
    return plt.dot(x, y.T)


def _convolved(
    sizes: _Sizes, ring_ref: Any, kernel_ref: Any, once: Array,
    *parts: tuple[Array, Array, Array, int],
) -> list[Array]:  # fmt: skip
    """SiLU of the convolution, in the ring's dtype, of parts: positions, which are real, the first
    channel and their number."""

    def add(tap: int, total: Array, part: tuple[Array, Array, Array, int]) -> Array:
        position, real, channel, width = part
        at = position + (tap - (sizes.taps - 1))
        known = jnp.broadcast_to((real & (at >= 0))[:, None], total.shape)
        slot = lax.rem(at + sizes.slots, sizes.slots)
        where = ring_ref.at[slot[:, None], (channel + jnp.arange(width))[None, :]]
        row = plt.load(where, mask=known, other=0.0)
        weight = kernel_ref[tap, pl.ds(channel, width)]
        return total + row.astype(jnp.float32) * weight.astype(jnp.float32)[None, :]

    def all_taps(_: Array, totals: list[Array]) -> list[Array]:
        for tap in range(sizes.taps):
            totals = [add(tap, total, part) for total, part in zip(totals, parts, strict=True)]
        return totals

    # A loop of one turn, which the compiler cannot know: Triton would compute straight-line sums in
    # the layout of a product's side, of which every warp holds all, and run out of registers.
    starts = [jnp.zeros((part[0].shape[0], part[3]), jnp.float32) for part in parts]
    totals = lax.fori_loop(0, once, all_taps, starts)
    return [(total * jax.nn.sigmoid(total)).astype(ring_ref.dtype) for total in totals]


def _norm(x: Array) -> Array:
    """What makes rows of length one, `[P]`."""
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(wide * wide, axis=1) + 1e-6)


def _tokens(ref: Any, real: Array) -> Array:
    """A number for every token, zero where it is not `real`: what stands there is not read."""
    values = plt.load(ref.at[jnp.arange(real.shape[0])], mask=real, other=0.0)
    return values.astype(jnp.float32)


def _rows(ref: Any, count: int) -> Any:
    """The first `count` rows of `ref`, which may have fewer."""
    return ref.at[jnp.arange(count)[:, None], jnp.arange(ref.shape[-1])[None, :]]


def _decay(G: Array, mask: Array) -> Array:
    """exp(G_i - G_j) where `mask[i, j]`, else 0; masked first, above the diagonal it grows."""
    difference = G[:, None] - G[None, :]
    return jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0.0)), 0.0)


def _inverse(sizes: _Sizes, A: Array, row: Array, column: Array) -> Array:
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


def _step(
    sizes: _Sizes, ring_ref: Any, kernel_ref: Any, a_ref: Any, b_ref: Any, A_log_ref: Any,
    dt_bias_ref: Any, state_ref: Any, update_ref: Any, G_ref: Any, length_ref: Any,
    pending_ref: Any, out_ref: Any, state_out: Any, update_out: Any, G_out: Any,
) -> None:  # fmt: skip
    """The program of one value head of one row."""
    P, kd, vd = sizes.P, sizes.kd, sizes.vd
    head = pl.program_id(0) % sizes.value_heads
    key_channel = head // (sizes.value_heads // sizes.key_heads) * kd
    keys = sizes.key_heads * kd
    length, keep = length_ref[0], pending_ref[0]
    index = jnp.arange(P)
    real, kept = index < sizes.T, index < keep

    old = _tokens(G_ref, kept)
    last = jnp.sum(jnp.where(index == keep - 1, old, 0.0))
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - old, 0.0)), 0.0)
    once = jnp.minimum(length + 1, 1)
    position, v_channel = length + index, 2 * keys + head * vd
    old_keys, q, k, v = _convolved(
        sizes, ring_ref, kernel_ref, once,
        (position - keep, kept, keys + key_channel, kd), (position, real, key_channel, kd),
        (position, real, keys + key_channel, kd), (position, real, v_channel, vd),
    )  # fmt: skip
    weight *= _norm(old_keys)

    q_norm, k_norm = _norm(q) * kd**-0.5, _norm(k)
    x = _tokens(a_ref, real) + dt_bias_ref[0]
    dt = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    g = jnp.where(real, -jnp.exp(A_log_ref[0]) * dt, 0.0)
    beta = jnp.where(real, jax.nn.sigmoid(_tokens(b_ref, real)), 0.0)

    row = lax.broadcasted_iota(jnp.int32, (P, P), 0)
    column = lax.broadcasted_iota(jnp.int32, (P, P), 1)
    G = jnp.sum(jnp.where(column <= row, g[None, :], 0.0), axis=1)
    plt.store(G_out.at[index], G, mask=real)
    through = _decay(G, column <= row) * k_norm[None, :]
    A = jnp.where(column < row, (beta * k_norm)[:, None] * through * _gram(sizes, k, k), 0.0)
    inverse = _inverse(sizes, A, row, column)
    mixing = q_norm[:, None] * through * _gram(sizes, q, k)
    k_scale, q_scale = jnp.exp(G) * k_norm, jnp.exp(G) * q_norm

    wide = jnp.broadcast_to(real[:, None], (P, vd))
    records = plt.load(_rows(update_ref, P), mask=wide & kept[:, None], other=0.0)
    state = jnp.exp(last) * state_ref[...].T
    state += _dot(sizes, (weight[:, None] * records).T, old_keys)
    state_out[...] = state.T
    told, asked = _dots(sizes, state, k.T, q.T)
    right = beta[None, :] * (v.astype(jnp.float32).T - told * k_scale[None, :])
    update = _dot(sizes, right, inverse.T)
    out = asked * q_scale[None, :] + _dot(sizes, update, mixing.T)
    plt.store(_rows(update_out, P), update.T, mask=wide)
    plt.store(_rows(out_ref, P), out.T.astype(out_ref.dtype), mask=wide)


def gated_delta_step(
    ring: Float[Array, "B slots channels"],
    kernel: Float[Array, "taps channels"],
    a: Float[Array, "B T vh"],
    b: Float[Array, "B T vh"],
    A_log: Float[Array, " vh"],
    dt_bias: Float[Array, " vh"],
    state: Float[Array, "B vh kd vd"],
    update: Float[Array, "B vh T vd"],
    G: Float[Array, "B vh T"],
    length: Int[Array, " B"],
    pending: Int[Array, " B"],
    *,
    key_heads: int,
    interpret: bool = False,
    warps: int = 8,
) -> tuple[Array, Array, Array, Array]:
    """`pallas_kernels.gated_delta_step`; state and records are updated in place."""
    B, slots, channels = ring.shape
    T = a.shape[1]
    vh, kd, vd = state.shape[1:]
    sizes = _Sizes(
        T=T, P=1 if T == 1 else max(LEAST, 1 << (T - 1).bit_length()), taps=kernel.shape[0],
        slots=slots, key_heads=key_heads, value_heads=vh, kd=kd, vd=vd, interpret=interpret,
    )  # fmt: skip
    # In a layer both are halves of one projection; joined again, XLA passes on the whole of it.
    gates = jnp.concatenate([b, a], axis=-1)
    b_tokens = pl.BlockSpec((None, T, None), lambda i: (i // vh, 0, i % vh))
    a_tokens = pl.BlockSpec((None, T, None), lambda i: (i // vh, 0, vh + i % vh))
    head = pl.BlockSpec((1,), lambda i: (i % vh,))
    batch_row = pl.BlockSpec((1,), lambda i: (i // vh,))
    states = pl.BlockSpec((None, None, kd, vd), lambda i: (i // vh, i % vh, 0, 0))
    updates = pl.BlockSpec((None, None, T, vd), lambda i: (i // vh, i % vh, 0, 0))
    decays = pl.BlockSpec((None, None, T), lambda i: (i // vh, i % vh, 0))
    outputs = pl.BlockSpec((None, T, None, vd), lambda i: (i // vh, 0, i % vh, 0))
    return pl.pallas_call(
        functools.partial(_step, sizes),
        grid=(B * vh,),
        in_specs=[
            pl.BlockSpec((None, slots, channels), lambda i: (i // vh, 0, 0)),
            pl.BlockSpec((kernel.shape[0], channels), lambda _: (0, 0)),
            a_tokens, b_tokens, head, head, states, updates, decays, batch_row, batch_row,
        ],
        out_specs=[outputs, states, updates, decays],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, vh, vd), ring.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, update, G)),
        ],
        input_output_aliases={6: 1, 7: 2, 8: 3},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_step",
    )(ring, kernel, gates, gates, A_log, dt_bias, state, update, G, length, pending)  # fmt: skip
