"""Linear projections whose precision follows their dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import Kernels
from pallas_kernels.parts import product_parts
from pallas_kernels.product import at_least_two, dot_general, logits, matmul_precision


def projected(
    projection: nnx.Linear, x: Float[Array, "*batch K"], parts: int, kernels: Kernels = "reference"
) -> Float[Array, "S P N"]:
    """A projection in `parts`, its rows those of all batch axes; with a bias it is in one.

    A single row stays two: cutting the second off would be a launch. `kernels` may make the parts.
    """
    rows = x.reshape(-1, x.shape[-1])
    if parts == 1 or projection.bias is not None:
        return projection(at_least_two(rows))[None]
    return product_parts(rows, projection.kernel[...], parts, kernels)


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
        return logits(hidden, self.embedding[...])
