"""Sizes that a server is built for, and whether the device holds them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from PIL import Image

from mmflash_jax.decode.prefill import empty_prompts
from mmflash_jax.decode.records import PatchedImage, Plan
from mmflash_jax.decode.slots import Shape, empty_slots
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.engine.serving import PREFILLS_AT_ONCE

SMALLEST_IMAGE = 64
LARGE_SIDE = 4096
# A square image wastes more of the processor's area than the best ratio of sides does.
SLACK = 1.25


class DoesNotFitError(ValueError):
    """The caches are larger than the device; the message has the numbers."""


def large_image(encoder: PromptEncoder) -> PatchedImage:
    """What the checkpoint's image processor makes of a very large square image."""
    image = Image.new("RGB", (LARGE_SIDE, LARGE_SIDE))
    return encoder.encode(Request(text="x", images=(image,))).images[0]


def image_sizes(largest: PatchedImage, capacity: int, side: int) -> tuple[int, ...]:
    """Patch counts that images are padded to.

    They double from 64 up to the largest image that the processor makes, but no further than a row
    has tokens for.
    """
    most = min(int(len(largest.patches) * SLACK), capacity * side**2)
    sizes = [SMALLEST_IMAGE]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def chunk_sizes(capacity: int) -> tuple[int, ...]:
    """Widths of prefill chunks that a row has room for."""
    fitting = tuple(width for width in Shape.widths if width <= capacity)
    return fitting or Shape.widths[:1]


def paces(slots: int, block: int) -> tuple[tuple[int, int], ...]:
    """Rows and widths that the loop is compiled for.

    A single request and a few have programs of their own, with drafts and without; with all rows
    in use drafts cost most, so their width has steps between.
    """
    narrower = {width for width in (8, 4) if width < block}
    few = {rows for rows in (1, 8) if rows < slots}
    return tuple(
        [(rows, width) for rows in sorted(few) for width in sorted({1, block})]
        + [(slots, width) for width in sorted({1, block, *narrower})]
    )


def cache_bytes(plan: Plan, shape: Shape) -> tuple[int, int]:
    """Bytes of the running state, and of the prompts on their way in."""

    def size(make: Callable[[], Any]) -> int:
        leaves = jax.eval_shape(lambda: jax.tree.leaves(make()))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    slots = size(lambda: empty_slots(plan, shape))
    one = size(lambda: empty_prompts(plan, 1, shape.capacity))
    width = plan.target.config.hidden_size * jnp.dtype(plan.target.dtype).itemsize
    return slots, PREFILLS_AT_ONCE * (one + shape.capacity * width)


def check_memory(plan: Plan, shape: Shape, free: int | None) -> int:
    """Bytes that the caches of `shape` take.

    Raises:
        DoesNotFitError: more than `free`, with the number of slots that would fit.
    """
    slots, prefills = cache_bytes(plan, shape)
    if free is not None and slots + prefills > free:
        each = slots // shape.slots
        fitting = max(free - prefills, 0) // each
        raise DoesNotFitError(
            f"{shape.slots} rows (--batch) of {shape.capacity} tokens (--max-length) take "
            f"{_gb(slots)}, prompts on their way in {_gb(prefills)}, and {_gb(free)} of device "
            f"memory are free: {fitting} rows of this length would fit"
        )
    return slots + prefills


def free_memory() -> int | None:
    """Bytes that the first device has left; None where it does not tell (CPUs)."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
