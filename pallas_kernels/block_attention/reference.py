"""Reference of block attention: two score products, one softmax, fp32 inside."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Finite, so that a row with many masked scores never produces NaN through inf - inf.
MASKED = -1e30


def block_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k_block: Float[Array, "B T K H"],
    v_block: Float[Array, "B T K H"],
    length: Int[Array, " B"],
    *,
    first: Int[Array, " B"] | None = None,
    scale: float,
    causal: bool,
    window: int | None = None,
    ring: bool = False,
) -> Float[Array, "B T N H"]:
    """Attend from a block at positions `length .. length + T - 1` to context and block.

    Cache slot `s` holds position `s`; in a `ring` it holds the last position below `length` that
    is `s` modulo the number of slots. Query `t` sees context positions below `length` and the
    block's own keys (`j <= t` when `causal`); with a `window` of W it sees only keys whose distance
    is below W, itself included, as transformers counts a sliding window. Slots that hold nothing
    below `length` are never read. Key/value head `k` serves query heads `k*G .. k*G + G - 1`.

    With `first`, context positions below it are never read either: in a packed training row they
    belong to another document.

    A ring needs a `window`, and at least `window - 1` slots more than the rows of any block that
    may be written to it and then rejected: see `layers.cache.write_rows`.

    Softmax runs in fp32; the products of fp32 inputs run at the highest precision.
    """
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q = q.reshape(B, T, K, N // K, H)

    def scores(keys: Array, spec: str) -> Array:
        product = jnp.einsum(spec, q, keys, precision=precision, preferred_element_type=jnp.float32)
        return product * scale

    def weigh(probabilities: Array, values: Array, spec: str) -> Array:
        probabilities = probabilities.astype(values.dtype)
        if jax.default_backend() == "cpu":
            # XLA:CPU has no bf16 x bf16 -> fp32 product at some of these shapes.
            probabilities, values = (x.astype(jnp.float32) for x in (probabilities, values))
        return jnp.einsum(
            spec,
            probabilities,
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    if ring and window is None:
        raise ValueError("a ring cache forgets old positions, so it needs a window")
    rows, slots = jnp.arange(T), jnp.broadcast_to(jnp.arange(S), (B, S))
    if ring:
        last = length[:, None] - 1
        slots = last - (last - slots) % S
    see_context = ((slots >= 0) & (slots < length[:, None]))[:, None]
    see_block = jnp.ones((T, T), bool)
    if first is not None:
        see_context &= (slots >= first[:, None])[:, None]
    if causal:
        see_block &= rows[None, :] <= rows[:, None]
    if window is not None:
        position = length[:, None] + rows
        see_context = see_context & (position[:, :, None] - slots[:, None] < window)
        see_block &= jnp.abs(rows[:, None] - rows[None, :]) < window

    context_scores = jnp.where(
        see_context[:, None, None], scores(k_cache, "BTKGH,BKSH->BKGTS"), MASKED
    )
    block_scores = jnp.where(see_block, scores(k_block, "BTKGH,BUKH->BKGTU"), MASKED)
    probabilities = jax.nn.softmax(jnp.concatenate([context_scores, block_scores], -1), -1)
    mixed = weigh(probabilities[..., :S], v_cache, "BKGTS,BKSH->BTKGH")
    mixed += weigh(probabilities[..., S:], v_block, "BKGTU,BUKH->BTKGH")
    return mixed.reshape(B, T, N, H).astype(v_block.dtype)
