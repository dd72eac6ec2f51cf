"""Normalisation layers, each with the rounding steps of its transformers counterpart."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import Norm, rms_norm, rms_normalise
from pallas_kernels.norm import Kind


class PlainNorm(nnx.Module):
    """An RMS norm over the last axis, of the `kind` that its class names."""

    kind: ClassVar[Kind]
    eps: float
    weight: nnx.Param | None

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.norm)

    @property
    def norm(self) -> Norm:
        """Weight and rounding steps."""
        return Norm(None if self.weight is None else self.weight[...], self.eps, self.kind)


class RMSNorm(PlainNorm):
    """Normalise in fp32, round to the input's dtype, times `weight` (Qwen3RMSNorm)."""

    kind = "rounded"

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))


class ZeroCentredRMSNorm(PlainNorm):
    """Normalise, times `1 + weight`, all in fp32, round once (Qwen3_5RMSNorm).

    The stored weight stays as it is in the checkpoint; the one is added by `rms_norm` and nowhere
    else.
    """

    kind = "zero_centred"

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((width,), dtype))


class GemmaRMSNorm(PlainNorm):
    """Normalise, times the plain `weight`, all in fp32, round once (Gemma4RMSNorm).

    Without a weight (`weighted=False`) it has no parameters.
    """

    kind = "plain"

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype, weighted: bool = True):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype)) if weighted else None


class GatedRMSNorm(nnx.Module):
    """RMS norm times `weight`, then times `silu(gate)` in fp32 (Qwen3_5RMSNormGated).

    The weight is fp32: checkpoints store it so, and it costs nothing.
    """

    def __init__(self, width: int, *, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(
        self, x: Float[Array, "*batch D"], gate: Float[Array, "*batch D"]
    ) -> Float[Array, "*batch D"]:
        normed = rms_normalise(x, self.eps).astype(x.dtype)
        scaled = self.weight[...] * normed.astype(jnp.float32)
        return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean and variance normalisation with weight and bias, in fp32 (torch LayerNorm)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)
