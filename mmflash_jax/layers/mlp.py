"""Feed-forward layers."""

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import linear


def gelu(x: Float[Array, "*batch F"], *, approximate: bool) -> Float[Array, "*batch F"]:
    """GELU, exact or in its tanh form, in fp32, rounded once, as torch computes it."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, no biases.

    Columns of gate, then of up lie in one kernel: XLA multiplies with both at once, and where it
    leaves that to a library it would join them anew in every step, a copy of all their weights.
    """

    activation: ClassVar[Callable[[Array], Array]]

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_up_proj = linear(width, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down_proj = linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(type(self).activation(gate) * up)


class SwiGLU(GatedMLP):
    """With SiLU."""

    activation = staticmethod(jax.nn.silu)


class GeGLU(GatedMLP):
    """With the tanh form of GELU."""

    activation = staticmethod(functools.partial(gelu, approximate=True))
