"""Random prompts of text and images, made without tokenizer and image processor."""

import numpy as np

from mmflash_jax.decode.records import PatchedImage, Prompt
from mmflash_jax.targets import Target

# Bytes come first in the tiny tokenizer; special ids lie above.
TEXT_IDS = 256


def make_prompt(target: Target, *parts: int | tuple[int, int], seed: int, max_tokens: int = 1):
    """A prompt of parts in order: a number is that many random text tokens, a pair is a random
    image of so many rows and columns of patches."""
    rng = np.random.default_rng(seed)
    merge = target.image_side
    pixels = target.config.vision.patch_values
    ids, media_idx, images, grids = [], [], [], []
    media = 0
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, TEXT_IDS, part).tolist()
            media_idx += [-1] * part
            continue
        rows, columns = part
        count = rows * columns // merge**2
        patches = rng.normal(size=(rows * columns, pixels)).astype(np.float32)
        images.append(PatchedImage(patches=patches, rows=rows, columns=columns, num_tokens=count))
        grids.append((rows // merge, columns // merge))
        ids += [target.config.image_token_id] * count
        media_idx += range(media, media + count)
        media += count
    array = np.array(ids, np.int32)
    positions, shift = target.prompt_positions(array, grids)
    return Prompt(
        ids=array,
        media_idx=np.array(media_idx, np.int32),
        positions=positions,
        rope_shift=shift,
        images=tuple(images),
        max_tokens=max_tokens,
    )
