"""Linear projections whose precision follows their dtype."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
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


def product_parts(
    x: Float[Array, "R K"], matrix: Float[Array, "K N"], parts: int
) -> Float[Array, "S P N"]:
    """fp32 parts that sum to `x @ matrix` (`pallas_kernels.parts`); `at_least_two` rows."""
    K, N = matrix.shape
    x = at_least_two(x)
    return lax.dot_general(
        x.reshape(len(x), parts, K // parts),
        matrix.reshape(parts, K // parts, N),
        (((2,), (1,)), ((1,), (0,))),
        precision=matmul_precision(matrix.dtype),
        preferred_element_type=jnp.float32,
    )


def projected(
    projection: nnx.Linear, x: Float[Array, "*batch K"], parts: int
) -> Float[Array, "S P N"]:
    """A projection in `parts`, its rows those of all batch axes; with a bias it is in one.

    A single row stays two: cutting the second off would be a launch.
    """
    rows = x.reshape(-1, x.shape[-1])
    if parts == 1 or projection.bias is not None:
        return projection(at_least_two(rows))[None]
    return product_parts(rows, projection.kernel[...], parts)


def linear(
    width_in: int, width_out: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, bias: bool = False
) -> nnx.Linear:
    """A `nnx.Linear` with kernel `[in, out]`, parameters and products in `dtype`."""
    return nnx.Linear(
        width_in,
        width_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=matmul_precision(dtype),
        kernel_init=nnx.initializers.normal(0.02),
        dot_general=dot_general,
        rngs=rngs,
    )


class Embedding(nnx.Module):
    """A token table `[V, D]` that can also serve as output head."""

    def __init__(self, vocabulary: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocabulary, width), jnp.float32) * 0.02
        self.embedding = nnx.Param(table.astype(dtype))

    def __call__(self, ids: Array) -> Array:
        """Rows of the table: ids `[...]` to `[..., D]`. Ids must lie inside the table."""
        return self.embedding[...][ids]

    def attend(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """fp32 logits of `hidden` against every row of the table."""
        table = self.embedding[...]
        return dot_general(
            hidden,
            table,
            (((hidden.ndim - 1,), (1,)), ((), ())),
            precision=matmul_precision(table.dtype),
            preferred_element_type=jnp.float32,
        )
