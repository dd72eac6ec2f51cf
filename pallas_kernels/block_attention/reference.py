"""Reference of block attention: two score products, one softmax, fp32 inside."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.choose import platform
from pallas_kernels.tree import ancestors_of, depths_of

# Finite, so that a row with many masked scores never produces NaN through inf - inf.
MASKED = -1e30


def block_attention(
    q: Float[Array, "R T N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k_block: Float[Array, "R U K H"],
    v_block: Float[Array, "R U K H"],
    length: Int[Array, " R"],
    *,
    first: Int[Array, " R"] | None = None,
    parents: Int[Array, "R U"] | None = None,
    scale: float,
    causal: bool,
    window: int | None = None,
    ring: bool = False,
) -> Float[Array, "R T N H"]:
    """`pallas_kernels.block_attention` in plain `jax.numpy`: scores of every slot, masked."""
    contexts = k_cache.shape[0]
    if len(q) > contexts:
        options = {"scale": scale, "causal": causal, "window": window, "ring": ring}

        def attend(q: Array, k: Array, v: Array, length: Array, first: Any, parents: Any) -> Array:
            return block_attention(
                q, k_cache, v_cache, k, v, length, first=first, parents=parents, **options
            )

        apart = jax.tree.map(
            lambda x: x.reshape(contexts, -1, *x.shape[1:]),
            (q, k_block, v_block, length, first, parents),
        )
        return jax.vmap(attend, in_axes=1, out_axes=1)(*apart).reshape(q.shape)
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q = q.reshape(B, T, K, N // K, H)

    def scores(keys: Array, spec: str) -> Array:
        product = jnp.einsum(spec, q, keys, precision=precision, preferred_element_type=jnp.float32)
        return product * scale

    def weigh(probabilities: Array, values: Array, spec: str) -> Array:
        probabilities = probabilities.astype(values.dtype)
        if platform() == "cpu":
            # XLA:CPU has no bf16 x bf16 -> fp32 product at some of these shapes.
            probabilities, values = (x.astype(jnp.float32) for x in (probabilities, values))
        return jnp.einsum(
            spec,
            probabilities,
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    slots = jnp.broadcast_to(jnp.arange(S), (B, S))
    if ring:
        last = length[:, None] - 1
        slots = last - (last - slots) % S
    see_context = ((slots >= 0) & (slots < length[:, None]))[:, None]
    if first is not None:
        see_context &= (slots >= first[:, None])[:, None]
    see_block, after = _inside(T, parents, causal=causal)
    if window is not None:
        position = length[:, None] + after[:, -T:]
        see_context = see_context & (position[:, :, None] - slots[:, None] < window)
        see_block &= jnp.abs(after[:, -T:, None] - after[:, None, :]) < window

    context_scores = jnp.where(
        see_context[:, None, None], scores(k_cache, "BTKGH,BKSH->BKGTS"), MASKED
    )
    block_scores = jnp.where(see_block[:, None, None], scores(k_block, "BTKGH,BUKH->BKGTU"), MASKED)
    probabilities = jax.nn.softmax(jnp.concatenate([context_scores, block_scores], -1), -1)
    mixed = weigh(probabilities[..., :S], v_cache, "BKGTS,BKSH->BTKGH")
    mixed += weigh(probabilities[..., S:], v_block, "BKGTU,BUKH->BTKGH")
    return mixed.reshape(B, T, N, H).astype(v_block.dtype)


def _inside(
    queries: int, parents: Int[Array, "B U"] | None, *, causal: bool
) -> tuple[Bool[Array, "#B T U"], Int[Array, "#B U"]]:
    """Which keys of the block each query may see, and how far after `length` each key stands."""
    if parents is not None:
        ancestors = ancestors_of(parents)
        return ancestors[:, -queries:], depths_of(ancestors)
    rows = jnp.arange(queries)
    see = rows[None, :] <= rows[:, None] if causal else jnp.ones((queries, queries), bool)
    return see[None], rows[None]
