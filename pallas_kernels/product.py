"""Products of rows with a matrix: their precision, and what XLA:GPU makes of few rows."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.choose import platform


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """fp32 products run in full fp32 (recent GPUs would use TF32); bf16 ones as they are."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def at_least_two(x: Float[Array, "R K"]) -> Float[Array, "P K"]:
    """Rows for a product with a matrix; on a GPU a single one twice.

    There XLA turns the product of one row with up to some eight million weights into a sum over all
    of them times the row, which it writes to memory first (docs/performance.md). The row taken
    twice keeps it a product and costs no launch: XLA repeats it inside the product.
    """
    return jnp.broadcast_to(x, (2, x.shape[1])) if len(x) == 1 and platform() == "gpu" else x


def dot_general(
    x: Float[Array, "*batch K"], matrix: Array, dimension_numbers: Any, **options: Any
) -> Float[Array, "*batch N"]:
    """`lax.dot_general` of the last axis of `x` with a matrix, of `at_least_two` rows."""
    batch = x.shape[:-1]
    if math.prod(batch) != 1:
        return lax.dot_general(x, matrix, dimension_numbers, **options)
    (_, contracted), none = dimension_numbers
    rows = at_least_two(x.reshape(1, -1))
    out = lax.dot_general(rows, matrix, (((1,), contracted), none), **options)
    return out[:1].reshape(*batch, -1)


def product(x: Float[Array, "*batch K"], matrix: Float[Array, "K N"]) -> Float[Array, "*batch N"]:
    """`x @ matrix` in their dtype, of `at_least_two` rows."""
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return dot_general(x, matrix, numbers, precision=matmul_precision(matrix.dtype))


def logits(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """fp32 products with every row of a token table, of `at_least_two` rows."""
    return dot_general(
        x,
        table,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=matmul_precision(table.dtype),
        preferred_element_type=jnp.float32,
    )
