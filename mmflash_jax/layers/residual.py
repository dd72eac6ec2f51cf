"""The residual stream between two products: what a layer adds to it, and the norm that follows."""

import math

from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import projected
from mmflash_jax.layers.norm import PlainNorm
from pallas_kernels import Kernels, residual_norm
from pallas_kernels.residual_norm import splits


def add_product(
    x: Float[Array, "*batch D"],
    projection: nnx.Linear,
    inputs: Float[Array, "*batch K"],
    norm: PlainNorm | None,
    *,
    post: PlainNorm | None = None,
    factor: Float[Array, " 1"] | None = None,
    kernels: Kernels,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """The stream `x` after `projection(inputs)` is added, and its norm (itself without a `norm`).

    `post` norms the product before, `factor` scales the sum. Kernels make all of it one launch
    after the product, which leaves adding up its parts to them.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    number = splits(rows, inputs.shape[-1], width, x.dtype, kernels)
    return residual_norm(
        x,
        projected(projection, inputs, number, kernels),
        None if norm is None else norm.norm,
        post=None if post is None else post.norm,
        factor=factor,
        kernels=kernels,
    )
