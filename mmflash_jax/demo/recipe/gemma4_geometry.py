"""Patches, pooling, rope angles and the sliding mask of a Gemma 4 prompt with one picture."""

import torch
from torch import Tensor

from mmflash_jax.demo.recipe.gemma4_shape import Gemma4Shape


def to_patches(images: Tensor, shape: Gemma4Shape) -> Tensor:
    """Scaled pixels as [batch, patches, patch * patch * 3] in rows, channels innermost."""
    (rows, columns), patch = shape.grid, shape.patch
    scaled = images.float() / 127.5 - 1
    scaled = scaled.view(-1, rows, patch, columns, patch, 3).transpose(2, 3)
    return scaled.reshape(images.shape[0], rows * columns, 3 * patch * patch)


def pool(hidden: Tensor, shape: Gemma4Shape) -> Tensor:
    """The mean over each square of patches."""
    (rows, columns), merge = shape.grid, shape.merge
    squares = hidden.view(-1, rows // merge, merge, columns // merge, merge, hidden.shape[-1])
    return squares.mean((2, 4)).flatten(1, 2)


def patch_positions(shape: Gemma4Shape) -> Tensor:
    """Column and row of every patch: long[patches, 2]."""
    rows, columns = shape.grid
    index = torch.arange(rows * columns)
    return torch.stack((index % columns, index // columns), -1)


def vision_angles(shape: Gemma4Shape) -> Tensor:
    """[patches, 2, a quarter of a head]: one half turns with the column, one with the row."""
    half = shape.vision_head_width // 2
    frequencies = shape.vision_theta ** -(torch.arange(0, half, 2).float() / half)
    return patch_positions(shape)[..., None] * frequencies


def text_angles(shape: Gemma4Shape, length: int, full: bool) -> Tensor:
    """[length, half a head]; full layers turn only their first frequencies."""
    width = shape.global_head_width if full else shape.head_width
    theta = shape.full_theta if full else shape.sliding_theta
    frequencies = theta ** -(torch.arange(0, width, 2).float() / width)
    if full:
        turned = int(shape.full_rotary_share * width // 2)
        frequencies[turned:] = 0
    return torch.arange(length)[:, None] * frequencies


def sliding_mask(shape: Gemma4Shape, length: int) -> Tensor:
    """bool[length, length]: a token sees itself and the `window - 1` tokens before it."""
    place = torch.arange(length)
    distance = place[:, None] - place[None]
    return (distance >= 0) & (distance < shape.window)
