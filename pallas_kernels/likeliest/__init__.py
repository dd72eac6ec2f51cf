"""The output head of greedy decoding: the most likely token of each row, without its logits."""

import math

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.hopper import ROWS
from pallas_kernels.likeliest import gpu, reference, streamed

__all__ = ["likeliest", "pays", "runs"]

# With fewer rows the logits are too small to matter. Not timed on a card yet (docs/performance.md).
FEWEST_ROWS, MOST_ROWS = 33, 128


def pays(rows: int) -> bool:
    """Whether the kernel is worth asking for."""
    return FEWEST_ROWS <= rows <= (hopper.MOST_ROWS if hopper.fits(ROWS) else MOST_ROWS)


def runs(table: Float[Array, "V D"], kernels: Kernels) -> bool:
    """Whether the kernel is what runs, so that logits are not made.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    return _chosen(table, kernels) != "reference"


def likeliest(
    x: Float[Array, "*batch D"],
    table: Float[Array, "V D"],
    *,
    vocabulary: int | None = None,
    kernels: Kernels = "reference",
) -> Int[Array, "*batch"]:
    """The index of the row of `table` with the largest product, the lowest among equals.

    Products are fp32. Only the first `vocabulary` rows count. An increasing function of the
    products, such as a soft cap, changes nothing but which of them are equal.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    chosen = _chosen(table, kernels)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if chosen == "reference":
        ids = reference.likeliest(rows, table, vocabulary)
    else:
        tokens, width = table.shape
        refused = streamed.obstacle(len(rows), tokens, width, table.dtype)
        # Before 0.11 the interpreter of Mosaic GPU does not turn a table round: it waits for ever.
        old = chosen == "interpret" and jax.__version_info__ < (0, 11)
        made_by = gpu if refused or old else streamed
        ids = made_by.likeliest(rows, table, vocabulary, interpret=chosen == "interpret")
    return ids.reshape(x.shape[:-1])


def _chosen(table: Array, kernels: Kernels) -> str:
    obstacle = None if kernels == "reference" else gpu.obstacle(*table.shape)
    return implementation("likeliest", kernels, table.dtype, obstacle)
