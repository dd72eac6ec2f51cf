"""RMS norms of the model families: one formula, and where each family rounds."""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Norm:
    """`x / rms(x) * (centre + weight)` over the last axis, in fp32.

    weight: `[D]`, or None for a plain normalisation.
    rounds_first: round to the input's dtype before the product with the weight, which then runs in
        that dtype (Qwen3); else round once, at the end (Qwen3.5, Gemma).
    """

    eps: float = field(metadata={"static": True})
    weight: Array | None = None
    centre: float = field(default=0.0, metadata={"static": True})
    rounds_first: bool = field(default=False, metadata={"static": True})


def rms_normalise(x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch D"]:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, in fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def normalise(x: Float[Array, "*batch D"], norm: Norm) -> Float[Array, "*batch D"]:
    """The norm of `x`, in its dtype."""
    normed = rms_normalise(x, norm.eps)
    if norm.weight is None:
        return normed.astype(x.dtype)
    if norm.rounds_first:
        return normed.astype(x.dtype) * norm.weight.astype(x.dtype)
    return (normed * (norm.centre + norm.weight.astype(jnp.float32))).astype(x.dtype)
