"""The output head of greedy decoding: the most likely token of each row, without its logits."""

import math
from types import ModuleType

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.likeliest import gpu, reference, streamed

__all__ = ["likeliest", "pays"]

# With fewer rows the logits are too small to matter (docs/performance.md).
FEWEST_ROWS, MOST_ROWS = 33, 128


def pays(rows: int, table: Float[Array, "V D"], kernels: Kernels) -> bool:
    """Whether a kernel is worth asking for and is what runs, so that logits are not made.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if rows < FEWEST_ROWS or (rows > MOST_ROWS and not _is_streamed(rows, table, kernels)):
        return False
    return _chosen(rows, table, kernels)[1] != "reference"


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
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    kernel, chosen = _chosen(len(rows), table, kernels)
    if chosen == "reference":
        ids = reference.likeliest(rows, table, vocabulary)
    else:
        ids = kernel.likeliest(rows, table, vocabulary, interpret=chosen == "interpret")
    return ids.reshape(x.shape[:-1])


def _is_streamed(rows: int, table: Array, kernels: Kernels) -> bool:
    """Whether the kernel for Hopper is the one that takes so many rows."""
    # Before 0.11 the interpreter of Mosaic GPU does not turn a table round: it waits for ever.
    if kernels == "interpret" and jax.__version_info__ < (0, 11):
        return False
    return streamed.takes(rows, *table.shape, dtype=table.dtype)


def _chosen(rows: int, table: Array, kernels: Kernels) -> tuple[ModuleType, str]:
    """Which of the kernels takes so many rows, and whether that or the reference runs."""
    obstacle = None if kernels == "reference" else gpu.obstacle(*table.shape)
    chosen = implementation("likeliest", kernels, table.dtype, obstacle)
    return streamed if _is_streamed(rows, table, kernels) else gpu, chosen
