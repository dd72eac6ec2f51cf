"""RMS norms of the model families: one formula, and where each family rounds."""

from dataclasses import dataclass, field
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Kind = Literal["rounded", "zero_centred", "plain"]
"""How a norm applies its weight. rounded: to the normalised row, rounded first (Qwen3RMSNorm).
zero_centred: as `1 + weight`, in fp32 (Qwen3_5RMSNorm). plain: in fp32 (Gemma4RMSNorm)."""


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """An RMS norm over the last axis; without a `weight` `[D]` it only normalises."""

    weight: Array | None
    eps: float = field(metadata={"static": True})
    kind: Kind = field(metadata={"static": True})


def rms_normalise(x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch D"]:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, in fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def weigh(normed: Array, weight: Array | None, kind: Kind, dtype: jnp.dtype) -> Array:
    """Normalised fp32 values times the weight, with the rounding steps of `kind`."""
    if weight is None:
        return normed.astype(dtype)
    if kind == "rounded":
        return normed.astype(dtype) * weight.astype(dtype)
    wide = weight.astype(jnp.float32)
    return (normed * (1.0 + wide if kind == "zero_centred" else wide)).astype(dtype)


def rms_norm(x: Float[Array, "*batch D"], norm: Norm) -> Float[Array, "*batch D"]:
    """`x` normed, in its own dtype."""
    return weigh(rms_normalise(x, norm.eps), norm.weight, norm.kind, x.dtype)
