"""What a target keeps of a tree of drafts until one path through it is chosen.

A chain is written to the caches at once, because rejected rows lie behind the committed length.
The accepted nodes of a tree are scattered over the block, so its rows wait beside the caches, and
the commit writes those of the path, in order: the caches are then those of a chain.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mmflash_jax.layers.cache import AttentionCache, write_cache
from pallas_kernels import HeadRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockRows:
    """An attention cache as a block reads it, and the block's own keys and values `[B, T, K, H]`.

    The cache may hold the block already: what stands at `length` and behind is not read.
    """

    cache: AttentionCache
    k: Array
    v: Array

    @classmethod
    def of(cls, heads: HeadRows, cache: AttentionCache) -> "BlockRows":
        """With the cache that was written with the heads, if one was."""
        if heads.k_cache is not None:
            cache = AttentionCache(k=heads.k_cache, v=heads.v_cache)
        return cls(cache=cache, k=heads.k, v=heads.v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TreeCache:
    """A target's cache after a tree was run, before `commit`: what each layer keeps, and where
    the tree starts, int32 `[B]`."""

    layers: tuple[Any, ...]
    length: Array


def along(path: Int[Array, "B P"], nodes: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B P *rest"]:
    """Rows of the nodes on a path."""
    index = path.reshape(*path.shape, *[1] * (nodes.ndim - 2))
    return jnp.take_along_axis(nodes, index, axis=1)


def commit_rows(
    rows: BlockRows,
    path: Int[Array, "B P"],
    length: Int[Array, " B"],
    keep: Int[Array, " B"],
    *,
    ring: bool = False,
) -> AttentionCache:
    """The cache with the first `keep` nodes of `path` at positions `length ..`."""
    k, v = along(path, rows.k), along(path, rows.v)
    return write_cache(rows.cache, k, v, length, keep, ring=ring)
