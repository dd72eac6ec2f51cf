"""The most likely token of each row in plain `jax.numpy`, which makes all logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.product import logits


def likeliest(
    x: Float[Array, "R D"], table: Float[Array, "V D"], vocabulary: int | None
) -> Int[Array, " R"]:
    """`pallas_kernels.likeliest`."""
    made = logits(x, table)
    return jnp.argmax(made[:, :vocabulary], axis=-1).astype(jnp.int32)
