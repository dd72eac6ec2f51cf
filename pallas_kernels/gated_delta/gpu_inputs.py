"""What the GPU kernels of a gated delta step make of a head's inputs, before any state.

Functions here run inside a kernel, in the program of one value head of one batch row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """T tokens after a block of `records` tokens, both padded to P rows."""

    T: int
    records: int
    P: int
    taps: int
    slots: int
    key_heads: int
    value_heads: int
    kd: int
    vd: int
    interpret: bool

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class Convolution:
    """Where its inputs are: those of earlier tokens in a ring, those of new ones apart.

    `ring` and `written` are the same memory. No slot is both read and written: the ring holds the
    `taps - 1` rows before the last block, that block and the next.
    """

    ring: Any
    new: Any
    kernel: Any
    written: Any


@dataclass(frozen=True)
class Part:
    """Some channels of P tokens from position `first` on.

    real: tokens that are there; others come out as zero and nothing of them is read.
    stored: of new tokens those to be put into the ring; None says that all are in it.
    """

    channel: Array | int
    width: int
    first: Int[Array, ""]
    real: Bool[Array, " P"]
    stored: Bool[Array, " P"] | None = None


def parts_of(
    sizes: Sizes, head: Array, length: Array, count: Array, keep: Array
) -> tuple[Part, Part, Part, Part]:
    """Pending keys; queries, keys and values of the new tokens.

    Of the value heads that share a key head the first puts its rows into the ring.
    """
    index = jnp.arange(sizes.P)
    real, counts = index < sizes.T, index < jnp.minimum(count, sizes.T)
    leads = counts & (head % sizes.group == 0)
    keys, channel = sizes.key_heads * sizes.kd, head // sizes.group * sizes.kd
    return (
        Part(keys + channel, sizes.kd, length - keep, index < keep),
        Part(channel, sizes.kd, length, real, leads),
        Part(keys + channel, sizes.kd, length, real, leads),
        Part(2 * keys + head * sizes.vd, sizes.vd, length, real, counts),
    )


def convolved(sizes: Sizes, source: Convolution, parts: Sequence[Part]) -> list[Array]:
    """SiLU of the convolution, `[P, width]` in the ring's dtype; puts new rows into the ring."""
    totals = [jnp.zeros((sizes.P, part.width), jnp.float32) for part in parts]
    for tap in range(sizes.taps):
        for place, part in enumerate(parts):
            weight = source.kernel[tap, pl.ds(part.channel, part.width)].astype(jnp.float32)
            row = _row(sizes, source, part, tap - (sizes.taps - 1)).astype(jnp.float32)
            totals[place] += row * weight[None, :]
    return [_silu(total).astype(source.ring.dtype) for total in totals]


def _silu(x: Array) -> Array:
    """A third of the instructions of `x * sigmoid(x)`: a root is one, a quotient is ten."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * -LOG2_E))
    return x * root * root


def _row(sizes: Sizes, source: Convolution, part: Part, back: int) -> Array:
    """Inputs `-back` tokens before each token of a part."""
    index, slots = jnp.arange(sizes.P), sizes.slots
    columns = (part.channel + jnp.arange(part.width))[None, :]
    slot = lax.rem(part.first + (back + slots), slots) + index
    # Padding stays past the end, never on the slot of a token.
    slot = jnp.where(part.real & (slot >= slots), slot - slots, slot)[:, None]

    def load(ref: Any, rows: Array, known: Array) -> Array:
        mask = jnp.broadcast_to(known[:, None], (sizes.P, part.width))
        return plt.load(ref.at[rows, columns], mask=mask, other=0.0)

    earlier = part.real & (part.first + index + back >= 0)
    if part.stored is None:
        return load(source.ring, slot, earlier)
    row = load(source.new, index[:, None] + back, part.real & (index + back >= 0))
    if back < 0:
        # One of the two is zero.
        return row + load(source.ring, slot, earlier & (index + back < 0))
    mask = jnp.broadcast_to(part.stored[:, None], (sizes.P, part.width))
    plt.store(source.written.at[slot, columns], row, mask=mask)
    return row


def inverse_norm(x: Float[Array, "P kd"]) -> Float[Array, " P"]:
    """What makes rows of length one."""
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(wide * wide, axis=1) + 1e-6)


def per_token(ref: Any, real: Bool[Array, " P"]) -> Float[Array, " P"]:
    """A number for every token, zero where it is not `real`: what stands there is not read."""
    values = plt.load(ref.at[jnp.arange(real.shape[0])], mask=real, other=0.0)
    return values.astype(jnp.float32)


def gates(
    a: Array, b: Array, A_log: Array, dt_bias: Array, real: Array
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Log decay and write strength, zero where a token is not `real`."""
    x = a + dt_bias
    dt = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return jnp.where(real, -jnp.exp(A_log) * dt, 0.0), jnp.where(real, jax.nn.sigmoid(b), 0.0)
