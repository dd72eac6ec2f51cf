"""Products in parts, each over a share of the inner axis.

Few rows give too few tiles to keep a card busy. Whoever takes a product's parts adds them up; where
XLA splits a product by itself, that takes a launch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.choose import PROCESSORS, Kernels
from pallas_kernels.product import at_least_two, matmul_precision
from pallas_kernels.tiles import shares

# Products that run on a processor at a time.
RESIDENT = 3
# Sides of the tiles of a product, what the weights of a column in a part are a multiple of, and the
# fewest of them. With these XLA, as it counts without autotuning, splits no part again: that would
# take the launch which parts save.
TILE_ROWS, TILE_COLUMNS, TILE_INNER, LEAST_PART = 128, 64, 64, 256


def number_of_parts(
    rows: int,
    width_in: int,
    width_out: int,
    dtype: DTypeLike = "bfloat16",
    kernels: Kernels = "reference",
) -> int:
    """Into how many parts to cut the product `[rows, width_in] x [width_in, width_out]`.

    A power of two that gives each processor two or three tiles to work on, and divides the weights
    of a column evenly; one where rows are many. Where a kernel makes the product
    (`pallas_kernels.hopper`) there are fewer.
    """
    if hopper.is_streamed(rows, width_in, width_out, dtype, kernels):
        return hopper.number_of_parts(width_in, width_out)
    tiles = -(-rows // TILE_ROWS) * -(-width_out // TILE_COLUMNS)
    most = RESIDENT * PROCESSORS // tiles
    return shares(width_in, most, multiple=TILE_INNER, least=LEAST_PART)


def product_parts(
    x: Float[Array, "R K"],
    matrix: Float[Array, "K N"],
    parts: int,
    kernels: Kernels = "reference",
) -> Float[Array, "S P N"]:
    """fp32 parts that sum to `x @ matrix`; `at_least_two` rows."""
    K, N = matrix.shape
    if x.dtype == matrix.dtype and hopper.is_streamed(len(x), K, N, x.dtype, kernels):
        return hopper.product_parts(x, matrix, parts, interpret=kernels == "interpret")
    x = at_least_two(x)
    return lax.dot_general(
        x.reshape(len(x), parts, K // parts),
        matrix.reshape(parts, K // parts, N),
        (((2,), (1,)), ((1,), (0,))),
        precision=matmul_precision(matrix.dtype),
        preferred_element_type=jnp.float32,
    )


def summed(load: Callable[[Any], Array], number: int) -> Array:
    """The fp32 sum of what `load` gives for each part, inside a kernel."""
    shares = [load(part).astype(jnp.float32) for part in np.arange(number, dtype=np.int32)]
    return functools.reduce(jnp.add, shares)


def check_rows(parts: Float[Array, "S P N"], rows: int, op: str) -> None:
    """
    Raises:
        ValueError: a product has fewer rows than `op` reads of it.
    """
    if parts.shape[1] < rows:
        raise ValueError(f"{op}: a product of {parts.shape[1]} rows is short of the {rows} needed")


def whole(parts: Float[Array, "S P N"], rows: int, dtype: DTypeLike) -> Float[Array, "R N"]:
    """The product of its parts, rounded once; rows beyond the first `rows` are cut off."""
    if len(parts) == 1:
        return parts[0, :rows].astype(dtype)
    return parts.astype(jnp.float32).sum(0)[:rows].astype(dtype)
