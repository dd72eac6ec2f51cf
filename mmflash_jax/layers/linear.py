"""Linear projections whose precision follows their dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """fp32 products run in full fp32 (recent GPUs would use TF32); bf16 ones as they are."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


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
        return jnp.einsum(
            "...D,VD->...V",
            hidden,
            table,
            precision=matmul_precision(table.dtype),
            preferred_element_type=jnp.float32,
        )
