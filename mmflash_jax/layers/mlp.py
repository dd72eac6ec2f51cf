"""Feed-forward layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import linear


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, no biases."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
