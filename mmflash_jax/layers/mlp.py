"""Feed-forward layers."""

import math
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import linear
from pallas_kernels import Kernels, gated_product
from pallas_kernels.gated_product import Activation, pays


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, no biases.

    Columns of gate, then of up lie in one kernel: XLA multiplies with both at once, and where it
    leaves that to a library it would join them anew in every step, a copy of all their weights.
    """

    activation: ClassVar[Activation]

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_up_proj = linear(width, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down_proj = linear(hidden, width, dtype=dtype, rngs=rngs)

    def inner(
        self, x: Float[Array, "*batch D"], kernels: Kernels = "reference"
    ) -> Float[Array, "*batch F"]:
        """What `down_proj` takes; by the kernel with as many rows as it is worth it for."""
        matrix, activation = self.gate_up_proj.kernel[...], type(self).activation
        worth = pays(math.prod(x.shape[:-1]), matrix, activation, kernels)
        return gated_product(x, matrix, activation, kernels=kernels if worth else "reference")

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.inner(x))


class SwiGLU(GatedMLP):
    """With SiLU."""

    activation = "silu"


class GeGLU(GatedMLP):
    """With the tanh form of GELU."""

    activation = "gelu_tanh"
