"""Patch order, positions and rope angles of a Qwen3.5 prompt with one picture of fixed size."""

import numpy as np
import torch
from torch import Tensor

from mmflash_jax.demo.recipe.qwen35_shape import Qwen35Shape


def to_patches(images: Tensor, shape: Qwen35Shape) -> Tensor:
    """Scaled pixels as [batch, patches, 3 * patch * patch] in merge-block order."""
    (rows, columns), merge, patch = shape.grid, shape.merge, shape.patch
    scaled = images.float() / 127.5 - 1
    scaled = scaled.view(
        -1, rows // merge, merge, patch, columns // merge, merge, patch, 3
    ).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return scaled.reshape(images.shape[0], rows * columns, 3 * patch * patch)


def vision_positions(shape: Qwen35Shape) -> tuple[Tensor, Tensor]:
    """The bilinear map from learned positions to patches, and the rope angles of each patch."""
    (rows, columns), merge = shape.grid, shape.merge
    order = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    order = order.transpose(0, 2, 1, 3).reshape(-1)
    patch_rows, patch_columns = order // columns, order % columns
    side = int(shape.vision_positions**0.5)
    source_rows = np.linspace(0, side - 1, rows)[patch_rows]
    source_columns = np.linspace(0, side - 1, columns)[patch_columns]
    interpolation = np.zeros((rows * columns, side * side), np.float32)
    patch_index = np.arange(rows * columns)
    for row, row_share in _two_taps(source_rows, side):
        for column, column_share in _two_taps(source_columns, side):
            target = (patch_index, row * side + column)
            np.add.at(interpolation, target, (row_share * column_share).astype(np.float32))
    quarter = shape.vision_width // shape.vision_heads // 2
    frequencies = 1 / 10_000 ** (torch.arange(0, quarter, 2).float() / quarter)
    angles = [
        torch.from_numpy(position)[:, None] * frequencies
        for position in (patch_rows, patch_columns)
    ]
    return torch.from_numpy(interpolation), torch.cat(angles, -1)


def _two_taps(source: np.ndarray, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
    low = np.floor(source).astype(int)
    return [(low, 1 - source % 1), (np.minimum(low + 1, side - 1), source % 1)]


def text_angles(shape: Qwen35Shape, prefix_length: int, length: int) -> Tensor:
    """Interleaved M-RoPE angles of a prompt whose picture starts at `prefix_length`."""
    rows, columns = (side // shape.merge for side in shape.grid)
    image = slice(prefix_length, prefix_length + rows * columns)
    positions = torch.arange(length).repeat(3, 1)
    index = torch.arange(rows * columns)
    positions[0, image] = prefix_length
    positions[1, image] = prefix_length + index // columns
    positions[2, image] = prefix_length + index % columns
    after = prefix_length + max(rows, columns)
    positions[:, image.stop :] = torch.arange(length - image.stop) + after
    exponents = torch.arange(0, shape.rotary_width, 2).float() / shape.rotary_width
    by_axis = positions[..., None].float() / shape.rope_theta**exponents
    angles = by_axis[0].clone()
    for axis in (1, 2):
        taken = slice(axis, 3 * shape.mrope_section[axis], 3)
        angles[:, taken] = by_axis[axis][:, taken]
    return angles
