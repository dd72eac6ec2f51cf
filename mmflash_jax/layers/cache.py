"""Key/value caches: a slot for every token, or a ring of the last ones."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionCache:
    """Keys and values `[B, K, S, H]`; slot s holds token s, in a ring the last one that is s
    modulo S."""

    k: Array
    v: Array


@dataclass(frozen=True, kw_only=True)
class CachedKeys:
    """Keys and values of committed tokens, and whether they lie in a ring (`block_attention`)."""

    cache: AttentionCache
    ring: bool

    def row(
        self, index: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 K H"], Float[Array, "B 1 K H"]]:
        """Key and value of one token of each row, which must be there."""
        slot = (index % self.cache.k.shape[2])[:, None, None, None]
        key, value = (
            jnp.take_along_axis(part, slot, axis=2).swapaxes(1, 2)
            for part in (self.cache.k, self.cache.v)
        )
        return key, value


def empty_cache(batch: int, heads: int, slots: int, width: int, dtype: jnp.dtype) -> AttentionCache:
    """A cache that holds nothing."""
    shape = (batch, heads, slots, width)
    return AttentionCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write_rows(
    cache: Float[Array, "B K S H"],
    rows: Float[Array, "B T K H"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    ring: bool = False,
) -> Float[Array, "B K S H"]:
    """Put the first `count` of `T` rows at slots `start ..` of each batch row.

    Rows past `count` and slots past the end are dropped, so padding never reaches a cache. In a
    `ring` slots count modulo S and the last S rows stay.

    A ring of `window + block` slots survives rejection: a rejected row has overwritten the token
    S positions before it, which lies outside the window of every position that is still to come.
    """
    B, T = rows.shape[:2]
    slots = cache.shape[2]
    step = jnp.arange(T)
    slot = start[:, None] + step
    wanted = step < count[:, None]
    if ring:
        wanted &= step >= count[:, None] - slots
        slot = slot % slots
    slot = jnp.where(wanted, slot, slots)
    return cache.at[jnp.arange(B)[:, None], :, slot].set(rows.astype(cache.dtype), mode="drop")


def write_cache(
    cache: AttentionCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    ring: bool = False,
) -> AttentionCache:
    """`write_rows` for keys and values."""
    return AttentionCache(
        k=write_rows(cache.k, k, start, count, ring=ring),
        v=write_rows(cache.v, v, start, count, ring=ring),
    )
