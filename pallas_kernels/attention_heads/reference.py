"""Reference of attention heads: norm, rotation and cache write, one after the other."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.norm import Norm, rms_norm
from pallas_kernels.parts import whole


class HeadRows(NamedTuple):
    """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]`, and the caches `[B, K, S, H]` after
    them; None where nothing of the kind was given."""

    q: Any = None
    k: Any = None
    v: Any = None
    k_cache: Any = None
    v_cache: Any = None


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Slots:
    """Where keys and values are written: caches `[B, K, S, H]`, of which the first `count` tokens
    `[B]` of each row take the slots `start ..` (`write_rows`)."""

    k: Array
    v: Array
    start: Array
    count: Array
    ring: bool = field(default=False, metadata={"static": True})


def turns(
    angles: Float[Array, "B T half"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine, rounded to the dtype of what is turned, as transformers does."""
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rotary(
    x: Float[Array, "B T N H"], angles: Float[Array, "B T half"]
) -> Float[Array, "B T N H"]:
    """Rotate the first `2 * half` dimensions of each head (dimension i pairs with i + half).

    Further dimensions pass through.
    """
    cosine, sine = (part[:, :, None] for part in turns(angles, x.dtype))
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cosine - second * sine, second * cosine + first * sine, rest]
    return jnp.concatenate(turned, axis=-1)


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


def attention_heads(
    q: Float[Array, "S P NQ"] | None,
    k: Float[Array, "S P KH"] | None,
    v: Float[Array, "S P KH"] | None,
    angles: Float[Array, "B T half"],
    *,
    dtype: DTypeLike,
    head_dim: int,
    gated: bool = False,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    v_norm: Norm | None = None,
    slots: Slots | None = None,
) -> HeadRows:
    """`pallas_kernels.attention_heads` in plain `jax.numpy`."""
    B, T = angles.shape[:2]

    def heads(x: Array | None, norm: Norm | None, width: int = head_dim) -> Array | None:
        if x is None:
            return None
        x = whole(x, B * T, dtype).reshape(B, T, -1, width)[..., :head_dim]
        return x if norm is None else rms_norm(x, norm)

    q, k = heads(q, q_norm, head_dim * (1 + gated)), heads(k, k_norm)
    q, k = (None if x is None else apply_rotary(x, angles) for x in (q, k))
    v = heads(v, v_norm)
    rows = HeadRows(q=q, k=k, v=v)
    if slots is None:
        return rows
    k_cache, v_cache = (
        write_rows(cache, part, slots.start, slots.count, ring=slots.ring)
        for cache, part in ((slots.k, rows.k), (slots.v, rows.v))
    )
    return rows._replace(k_cache=k_cache, v_cache=v_cache)
