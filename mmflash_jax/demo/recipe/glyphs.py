"""Warm-up of the image tower: naming the character in every cell of a picture.

Without it the whole model sits on a plateau where it has learnt the wording but not where to look.
"""

import string

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.charts import CELL, NO_GLYPH, glyph
from mmflash_jax.demo.recipe.feed import UNSUPERVISED_GLYPH
from mmflash_jax.demo.recipe.network import project
from mmflash_jax.demo.recipe.shape import TargetShape

GLYPH_CLASSES = 96  # printable ASCII, by code point minus 32
_BLANK_WEIGHT = 0.05  # most cells are blank


class GlyphNamer:
    """A linear head over merged image tokens that names the four glyphs under each."""

    def __init__(self, shape: TargetShape, device: str, dtype: torch.dtype, seed: int) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        generator = torch.Generator().manual_seed(seed)
        size = (shape.merge**2 * GLYPH_CLASSES, shape.width)
        self.head = (torch.randn(size, generator=generator) * 0.05).to(device).requires_grad_()
        self._class_weight = torch.ones(GLYPH_CLASSES, device=device)
        self._class_weight[NO_GLYPH] = _BLANK_WEIGHT
        characters = string.ascii_letters + string.digits
        atlas = np.stack([glyph(character) for character in characters])
        self._atlas = torch.from_numpy(atlas).to(device).float() / 255
        codes = [ord(character) - 32 for character in characters]
        self._codes = torch.tensor(codes, device=device)

    def loss(self, features: Tensor, glyph_codes: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted cross-entropy, and the share of rightly named glyphs."""
        (rows, columns), merge = self.shape.grid, self.shape.merge
        blocks = glyph_codes.view(-1, rows // merge, merge, columns // merge, merge)
        codes = blocks.permute(0, 1, 3, 2, 4).reshape(-1).long()
        supervised = codes != UNSUPERVISED_GLYPH
        codes = torch.where(supervised, codes, NO_GLYPH)
        logits = project(features.to(self.dtype), self.head).float().reshape(-1, GLYPH_CLASSES)
        weight = self._class_weight[codes] * supervised
        loss = functional.cross_entropy(logits, codes, reduction="none")
        drawn = codes > NO_GLYPH
        right = ((logits.argmax(-1) == codes) & drawn).sum() / drawn.sum().clamp(min=1)
        return (loss * weight).sum() / weight.sum().clamp(min=1), right

    def random_pictures(self, batch: int) -> tuple[Tensor, Tensor]:
        """Pictures dense with glyphs, tinted grounds and dark boxes, with their glyph codes."""
        rows, columns = self.shape.grid

        def chance(*size: int) -> Tensor:
            return torch.rand(size, device=self.device)

        which = torch.randint(0, len(self._codes), (batch, rows, columns), device=self.device)
        written = chance(batch, rows, columns) < 0.6
        tinted = chance(batch, 1, 1, 1) < 0.5
        ground = 255 - 60 * chance(batch, 1, 1, 3) * tinted
        ink = torch.where(written[..., None, None], self._atlas[which], 1.0)
        ink = ink.permute(0, 1, 3, 2, 4).reshape(batch, rows * CELL, columns * CELL, 1)
        light = written | (chance(batch, rows, columns) < 0.6)
        box = torch.where(light, 1.0, 0.4)
        box = box.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)[..., None]
        pictures = (ink * ground * box).to(torch.uint8)
        return pictures, torch.where(written, self._codes[which], NO_GLYPH)
