"""Feed-forward layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import linear


def gelu(x: Float[Array, "*batch F"], *, approximate: bool) -> Float[Array, "*batch F"]:
    """GELU, exact or in its tanh form, in fp32, rounded once, as torch computes it."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, no biases."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = linear(hidden, width, dtype=dtype, rngs=rngs)

    def inner(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """What `down_proj` takes."""
        return jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.inner(x))


class GeGLU(nnx.Module):
    """`down(gelu_tanh(gate(x)) * up(x))`, no biases."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = linear(hidden, width, dtype=dtype, rngs=rngs)

    def inner(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """What `down_proj` takes."""
        return gelu(self.gate_proj(x), approximate=True) * self.up_proj(x)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.inner(x))
