"""Tiles of the tensor cores, as kernels cut their work up."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

LEAST = 16
"""The smallest side of a tensor-core product."""


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def dot(a: Array, b: Array) -> Array:
    """fp32 product of matrices of one dtype, inside a kernel."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)
