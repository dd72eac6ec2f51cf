"""Feed-forward layers."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.activation import Activation, activate
from mmflash_jax.layers.linear import linear


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, no biases.

    Columns of gate, then of up lie in one kernel: XLA multiplies with both at once, and where it
    leaves that to a library it would join them anew in every step, a copy of all their weights.
    """

    activation: ClassVar[Activation]

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_up_proj = linear(width, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down_proj = linear(hidden, width, dtype=dtype, rngs=rngs)

    def inner(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """What `down_proj` takes."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return activate(gate, type(self).activation) * up

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.inner(x))


class SwiGLU(GatedMLP):
    """With SiLU."""

    activation = "silu"


class GeGLU(GatedMLP):
    """With the tanh form of GELU."""

    activation = "gelu_tanh"
