"""Key/value caches: a slot for every token, or a ring of the last ones."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Slots, write_rows


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


def slots_of(
    cache: AttentionCache, start: Int[Array, " B"], count: Int[Array, " B"], *, ring: bool = False
) -> Slots:
    """Where the first `count` tokens from `start` on are written."""
    return Slots(k=cache.k, v=cache.v, start=start, count=count, ring=ring)


def may_write_first(slots: int, tokens: int, window: int | None) -> bool:
    """Whether a block of `tokens` may enter a cache before its own queries read it.

    Its tokens go to positions `length ..`, and queries read the cache below `length` only. In a
    ring a written token takes the slot of the one `slots` positions before it, `length + tokens - 1
    - slots` at most, while the first query's window begins at `length - window + 1`.
    """
    return window is None or slots >= window - 1 + tokens


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
