"""What the kernels of block attention share: which keys a query sees, rows of memory, blocks.

Rows of a program are the tokens of a block times the query heads of a group.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which keys a query sees; `scale` is in units of log 2."""

    T: int
    G: int
    scale: float
    causal: bool
    window: int | None
    ring: bool
    has_first: bool


def rows_at(ref: Any, *index: Array) -> Any:
    """Whole rows of the last axis at `index` of the others: `[len(index[0]), H]`."""
    return ref.at[*(at[:, None] for at in index), jnp.arange(ref.shape[-1])[None, :]]


def load_rows(ref: Any, real: Array, *index: Array) -> Array:
    """Rows of `ref`, zero where they are not `real`: what stands there is never read."""
    return plt.load(rows_at(ref, *index), mask=wide(real, ref.shape[-1]), other=0.0)


def wide(mask: Array, width: int) -> Array:
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], width))


def rule_of(
    q: Array, cache: Array, first: Array | None, *, scale: float, causal: bool, window: int | None,
    ring: bool = False,
) -> Rule:  # fmt: skip
    """The rule of an operation's arguments."""
    return Rule(
        T=q.shape[1], G=q.shape[2] // cache.shape[1], scale=scale * math.log2(math.e),
        causal=causal, window=window, ring=ring, has_first=first is not None,
    )  # fmt: skip


def seen_context(
    rule: Rule, real: Bool[Array, " keys"], position: Int[Array, " keys"], t: Int[Array, " rows"],
    length: Int[Array, ""],
) -> Bool[Array, "rows keys"]:  # fmt: skip
    """Which of the `real` positions of a context the tokens `t` of a block see."""
    seen = jnp.broadcast_to(real[None, :], (t.shape[0], real.shape[0]))
    if rule.window is not None:
        seen &= position[None, :] > length + t[:, None] - rule.window
    return seen


def seen_block(
    rule: Rule, u: Int[Array, " keys"], t: Int[Array, " rows"]
) -> Bool[Array, "rows keys"]:
    """Which tokens `u` of a block its tokens `t` see."""
    seen = jnp.broadcast_to((u < rule.T)[None, :], (t.shape[0], u.shape[0]))
    if rule.causal:
        seen &= u[None, :] <= t[:, None]
    if rule.window is not None:
        seen &= jnp.abs(u[None, :] - t[:, None]) < rule.window
    return seen


def of_block(heads: int, *shape: int | None) -> pl.BlockSpec:
    """What belongs to the block and the key/value head of program `(i, j)`, heads behind tokens."""
    zeros = [0] * (len(shape) - 2)
    return pl.BlockSpec((None, *shape), lambda i, _: (i // heads, 0, i % heads, *zeros))


def of_head(heads: int, *shape: int) -> pl.BlockSpec:
    """The same where heads come before everything else."""
    zeros = [0] * len(shape)
    return pl.BlockSpec((None, None, *shape), lambda i, _: (i // heads, i % heads, *zeros))
