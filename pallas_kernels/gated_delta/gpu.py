"""A step of the gated delta rule as a Pallas kernel for NVIDIA GPUs (Triton backend).

A program takes one value head of one batch row: its whole state is in registers while the last
block is folded in, written, and read by the new block. Products of fp32 values run as three TF32
products, whose error is that of fp32 (one TF32 product would cost three digits of the state).
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
    """T tokens padded to P rows, `taps` of the convolution, `slots` of the ring."""

    T: int
    P: int
    taps: int
    slots: int
    key_heads: int
    value_heads: int
    kd: int
    vd: int
    interpret: bool


def _dot(sizes: _Sizes, x: Array, y: Array) -> Array:
    """fp32 product of `[P, k]` and `[k, n]`."""
    if x.shape[0] == 1:
        return jnp.sum(x.reshape(x.shape[1], 1) * y, axis=0)[None, :]
    if x.shape[1] == 1:
        return x * y
    # The interpreter's backends know full fp32 only.
    exact = lax.Precision.HIGHEST
    precision = exact if sizes.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return plt.dot(x, y, precision=precision)


def _convolved(
    sizes: _Sizes, ring_ref: Any, kernel_ref: Any, position: Array, real: Array, channel: Array,
    width: int,
) -> Array:  # fmt: skip
    """SiLU of the convolution at `position` for `width` channels, rounded as the reference does."""
    columns = jnp.arange(width)
    total = jnp.zeros((position.shape[0], width), jnp.float32)
    for tap in range(sizes.taps):
        at = position + (tap - (sizes.taps - 1))
        known = jnp.broadcast_to((real & (at >= 0))[:, None], total.shape)
        slot = lax.rem(at + sizes.slots, sizes.slots)
        where = ring_ref.at[slot[:, None], (channel + columns)[None, :]]
        row = plt.load(where, mask=known, other=0.0)
        weight = kernel_ref[tap, pl.ds(channel, width)]
        total += row.astype(jnp.float32) * weight.astype(jnp.float32)[None, :]
    return (total * jax.nn.sigmoid(total)).astype(ring_ref.dtype).astype(jnp.float32)


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=1) + 1e-6)[:, None]


def _masked(ref: Any, real: Array) -> Array:
    """A vector of tokens, or rows of them, padded with zeros."""
    index = jnp.arange(real.shape[0])
    if len(ref.shape) == 1:
        return plt.load(ref.at[index], mask=real, other=0.0).astype(jnp.float32)
    columns = jnp.arange(ref.shape[1])
    mask = jnp.broadcast_to(real[:, None], (real.shape[0], ref.shape[1]))
    return plt.load(ref.at[index[:, None], columns[None, :]], mask=mask, other=0.0)


def _put(ref: Any, value: Array, real: Array) -> None:
    index, value = jnp.arange(real.shape[0]), value.astype(ref.dtype)
    if value.ndim == 1:
        plt.store(ref.at[index], value, mask=real)
        return
    at = ref.at[index[:, None], jnp.arange(value.shape[1])[None, :]]
    plt.store(at, value, mask=jnp.broadcast_to(real[:, None], value.shape))


def _decay(G: Array, mask: Array) -> Array:
    """exp(G_i - G_j) where `mask[i, j]`, else 0; masked first, above the diagonal it grows."""
    difference = G[:, None] - G[None, :]
    return jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0.0)), 0.0)


def _solve(sizes: _Sizes, A: Array, right: Array, row: Array, column: Array) -> Array:
    """(I + A)^-1 right for a strictly lower triangular `A`, by doubling block sizes."""
    P = sizes.P
    if P == 1:
        return right
    inverse = jnp.where(row == column, 1.0, 0.0)
    width = 1
    while width < P:
        below = ((row // width) % 2 == 1) & (column // width == row // width - 1)
        part = jnp.where(below, A, 0.0)
        if width > 1:
            part = _dot(sizes, _dot(sizes, inverse, part), inverse)
        inverse -= part
        width *= 2
    return _dot(sizes, inverse, right)


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

    def convolved(position: Array, real: Array, channel: Array, width: int) -> Array:
        return _convolved(sizes, ring_ref, kernel_ref, position, real, channel, width)

    old = _masked(G_ref, real & kept)
    last = jnp.sum(jnp.where(index == keep - 1, old, 0.0))
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - old, 0.0)), 0.0)
    old_keys = _unit(convolved(length - keep + index, kept, keys + key_channel, kd))
    folded = _dot(sizes, (old_keys * weight[:, None]).T, _masked(update_ref, real & kept))
    state = jnp.exp(last) * state_ref[...] + folded
    state_out[...] = state

    q = _unit(convolved(length + index, real, key_channel, kd)) * kd**-0.5
    k = _unit(convolved(length + index, real, keys + key_channel, kd))
    v = convolved(length + index, real, 2 * keys + head * vd, vd)
    x = _masked(a_ref, real) + dt_bias_ref[0]
    dt = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    g = jnp.where(real, -jnp.exp(A_log_ref[0]) * dt, 0.0)
    beta = jnp.where(real, jax.nn.sigmoid(_masked(b_ref, real)), 0.0)

    row = lax.broadcasted_iota(jnp.int32, (P, P), 0)
    column = lax.broadcasted_iota(jnp.int32, (P, P), 1)
    G = jnp.sum(jnp.where(column <= row, g[None, :], 0.0), axis=1)
    through = _decay(G, column <= row)
    grown = jnp.exp(G)[:, None]
    A = jnp.where(column < row, beta[:, None] * through * _dot(sizes, k, k.T), 0.0)
    right = beta[:, None] * (v - grown * _dot(sizes, k, state))
    update = _solve(sizes, A, right, row, column)
    out = grown * _dot(sizes, q, state) + _dot(sizes, through * _dot(sizes, q, k.T), update)
    _put(out_ref, out, real)
    _put(update_out, update, real)
    _put(G_out, G, real)


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
    tokens = pl.BlockSpec((None, T, None), lambda i: (i // vh, 0, i % vh))
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
            pl.BlockSpec((kernel.shape[0], channels), lambda i: (0, 0)),
            tokens, tokens, head, head, states, updates, decays, batch_row, batch_row,
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
    )(ring, kernel, a, b, A_log, dt_bias, state, update, G, length, pending)  # fmt: skip
