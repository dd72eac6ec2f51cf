"""Every program that a server's requests can need, to be compiled before the first of them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.compilation import Lowering
from mmflash_jax.decode.prefill import empty_prompts, encode_image_batch, prefill_chunk
from mmflash_jax.decode.records import DecodeState, PatchedImage, Plan, Prompt
from mmflash_jax.decode.slots import Pieces, Shape, run


def large_programs(
    pieces: Pieces,
    state: DecodeState,
    paces: tuple[tuple[int, int], ...],
    channels: int,
) -> Iterator[Lowering]:
    """The loop for each of `paces` (rows, width), prompt chunks, and images of `channels` values a
    patch, 0 for no images."""
    plan, params, shape = pieces.plan, pieces.params, pieces.shape
    for rows, width in paces:
        options = {"steps": shape.steps, "rows": rows, "width": width}
        yield functools.partial(run.lower, plan, params, state, np.int32(0), **options)
    prompt = empty_prompts(plan, 1, shape.capacity)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    for width in shape.widths:
        yield functools.partial(
            prefill_chunk.lower, plan, params, prompt, ints((1, width)), pieces.no_media,
            ints((1, width)), ints((plan.target.position_axes, 1, width)), ints((1,)), ints((1,)),
        )  # fmt: skip
    for size in shape.image_sizes if channels else ():
        patches = jax.ShapeDtypeStruct((1, size, channels), jnp.float32)
        yield functools.partial(
            encode_image_batch.lower, plan, params, patches, ints((1,)), ints((1,))
        )


def blank_prompts(plan: Plan, shape: Shape, channels: int) -> Iterator[Prompt]:
    """A prompt for each width of a chunk and each size of an image."""
    for width in shape.widths:
        yield _blank(plan, min(width, shape.capacity - 1), ())
    for size in shape.image_sizes if channels else ():
        patches = np.zeros((size, channels), np.float32)
        yield _blank(plan, 1, (PatchedImage(patches=patches, rows=2, columns=2, num_tokens=1),))


def _blank(plan: Plan, length: int, images: tuple[PatchedImage, ...]) -> Prompt:
    return Prompt(
        ids=np.zeros(length, np.int32),
        media_idx=np.full(length, -1, np.int32),
        positions=np.zeros((plan.target.position_axes, length), np.int32),
        rope_shift=0,
        images=images,
        max_tokens=2,
    )
