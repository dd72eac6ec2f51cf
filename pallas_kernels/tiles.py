"""Tiles of the tensor cores, as kernels cut their work up."""

from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from pallas_kernels.product import matmul_precision

LEAST = 16
"""The smallest side of a tensor-core product."""


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def divisor(width: int, most: int) -> int:
    """The largest power of two that divides `width`, at most `most`."""
    return min(width & -width, most)


def shares(width: int, most: int, *, multiple: int, least: int) -> int:
    """Into how many shares to cut `width`: a power of two up to `most`, each of them a multiple of
    `multiple` and not below `least`; one if none fits."""
    number = 1
    while 2 * number <= most and width % (2 * number * multiple) == 0:
        if 2 * number * least > width:
            break
        number *= 2
    return number


def dot(a: Array, b: Array) -> Array:
    """fp32 product of matrices of one dtype, inside a kernel."""
    return plt.dot(a, b, precision=matmul_precision(a.dtype))
