"""What lies between two products of a transformer layer: the outcome of one joins the stream, whose
norm the next one takes."""

import math

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.norm import Norm
from pallas_kernels.parts import check_rows, number_of_parts
from pallas_kernels.residual_norm import gpu, reference

__all__ = ["residual_norm", "splits"]


def splits(
    rows: int, width_in: int, width_out: int, dtype: DTypeLike, kernels: Kernels = "reference"
) -> int:
    """How many `parts` `residual_norm` wants of a product of `rows` with `[width_in, width_out]`
    weights in `dtype`: the reference one, the kernel as many as keep a card busy.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if _chosen(width_out, dtype, kernels) == "reference":
        return 1
    return number_of_parts(rows, width_in, width_out, dtype, kernels)


def residual_norm(
    x: Float[Array, "*batch D"],
    parts: Float[Array, "S P D"],
    norm: Norm | None,
    *,
    post: Norm | None = None,
    factor: Float[Array, " 1"] | None = None,
    kernels: Kernels = "reference",
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """The stream `x` after a product is added, and its norm (itself if `norm` is None).

    `parts` sum to the product, whose result is rounded to the dtype of `x` once; their rows follow
    the batch axes of `x`, and rows beyond those are ignored. `post` norms the product before it is
    added, `factor` scales the stream afterwards. Each step is rounded where the layers of
    transformers round it; the kernel sums squares in another order.

    The kernel has no gradient: training takes the reference.

    Raises:
        ValueError: the product has too few rows.
        KernelError: `kernels` names a kernel that cannot run here.
    """
    chosen = _chosen(x.shape[-1], x.dtype, kernels)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    check_rows(parts, len(rows), "residual_norm")
    if chosen == "reference":
        made = reference.residual_norm(rows, parts, norm, post=post, factor=factor)
    else:
        made = gpu.residual_norm(
            rows, parts, norm, post=post, factor=factor, interpret=chosen == "interpret"
        )
    stream, normed = (one.reshape(x.shape) for one in made)
    return stream, normed


def _chosen(width: int, dtype: DTypeLike, kernels: Kernels) -> str:
    obstacle = None if kernels == "reference" else gpu.obstacle(width)
    return implementation("residual_norm", kernels, dtype, obstacle)
