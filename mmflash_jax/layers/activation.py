"""Activations, rounded as torch rounds them."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Literal["silu", "gelu_tanh", "gelu"]
"""SiLU; GELU in its tanh form and exact."""


def activate(x: Float[Array, "*batch"], activation: Activation) -> Float[Array, "*batch"]:
    """The activation in fp32, rounded once, as torch computes it."""
    functions: dict[Activation, Callable[[Array], Array]] = {
        "silu": jax.nn.silu,
        "gelu_tanh": lambda wide: jax.nn.gelu(wide, approximate=True),
        "gelu": lambda wide: jax.nn.gelu(wide, approximate=False),
    }
    return functions[activation](x.astype(jnp.float32)).astype(x.dtype)
