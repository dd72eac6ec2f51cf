"""What lies between two products of a transformer layer, in plain `jax.numpy`."""

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

    @property
    def static(self) -> tuple[bool, float, Kind]:
        """What a kernel is compiled for."""
        return self.weight is not None, self.eps, self.kind


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


def residual_norm(
    x: Float[Array, "R D"],
    parts: Float[Array, "S P D"],
    norm: Norm | None,
    *,
    post: Norm | None = None,
    factor: Float[Array, " 1"] | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"]]:
    """`pallas_kernels.residual_norm`."""
    out = parts[0] if len(parts) == 1 else jnp.sum(parts.astype(jnp.float32), axis=0)
    out = out[: len(x)].astype(x.dtype)
    x = x + (out if post is None else rms_norm(out, post))
    if factor is not None:
        x = x * factor
    return x, x if norm is None else rms_norm(x, norm)
