"""Writing new rows into a key/value cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_rows(
    cache: Float[Array, "B K S H"],
    rows: Float[Array, "B T K H"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B K S H"]:
    """Put the first `count` of `T` rows at slots `start ..` of each batch row.

    Rows past `count` and slots past the end are dropped, so padding never reaches a cache.
    """
    B, T = rows.shape[:2]
    slots = cache.shape[2]
    step = jnp.arange(T)
    slot = jnp.where(step < count[:, None], start[:, None] + step, slots)
    return cache.at[jnp.arange(B)[:, None], :, slot].set(rows.astype(cache.dtype), mode="drop")
