"""The inner half of a gated feed-forward layer: both of its products and what joins them."""

import math

from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.gated_product import gpu, reference
from pallas_kernels.gated_product.reference import Activation, activate

__all__ = ["Activation", "activate", "gated_product", "pays"]

# With fewer rows XLA's product is faster, by more than the launch behind it takes; with more there
# is another kernel, for numbers of rows that are whole products of tensor cores.
FEWEST_ROWS, MOST_ROWS = 3, 32


def pays(rows: int, matrix: Float[Array, "K N"], activation: Activation, kernels: Kernels) -> bool:
    """Whether a kernel is worth asking for.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    few = FEWEST_ROWS <= rows <= MOST_ROWS
    return few or _is_streamed(rows, matrix, activation, kernels)


def _is_streamed(rows: int, matrix: Array, activation: Activation, kernels: Kernels) -> bool:
    K, N = matrix.shape
    # Mosaic GPU has no error function (jax 0.11.2).
    return activation != "gelu" and hopper.is_streamed(
        rows, K, N // 2, matrix.dtype, kernels, hopper.MOST_ROWS
    )


def gated_product(
    x: Float[Array, "*batch K"],
    matrix: Float[Array, "K N"],
    activation: Activation,
    *,
    kernels: Kernels = "reference",
) -> Float[Array, "*batch F"]:
    """`act(x @ gate) * (x @ up)`, where `matrix` holds the columns of gate, then those of up.

    Each product is rounded to its dtype before it goes on, as is the activation, which is computed
    in fp32. The kernel has no gradient: training takes the reference.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    tile = None
    if _is_streamed(len(rows), matrix, activation, kernels):
        tile = hopper.own_tile(len(rows), matrix.shape[1] // 2, 2, matrix.dtype)
    obstacle = None if kernels == "reference" else gpu.obstacle(*matrix.shape)
    op = "gated_product" if tile is None else "streamed_product"
    chosen = implementation(op, kernels, matrix.dtype, obstacle)
    if chosen == "reference":
        return reference.gated_product(x, matrix, activation)
    made = gpu.gated_product(rows, matrix, activation, tile=tile, interpret=chosen == "interpret")
    return made.reshape(*x.shape[:-1], made.shape[-1])
