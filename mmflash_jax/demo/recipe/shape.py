"""Sizes that every family's tiny model has, and a helper that draws starting weights."""

import math
from dataclasses import dataclass

import torch

from mmflash_jax.demo.charts import HEIGHT, WIDTH


@dataclass(frozen=True)
class TargetShape:
    """Sizes common to the families; the defaults are what ships."""

    vocabulary: int
    width: int = 192
    mlp_width: int = 448
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    vision_width: int = 96
    vision_mlp_width: int = 288
    vision_layers: int = 3
    vision_heads: int = 3
    patch: int = 8
    merge: int = 2
    image_height: int = HEIGHT
    image_width: int = WIDTH

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_height // self.patch, self.image_width // self.patch

    @property
    def image_tokens(self) -> int:
        """One for each square of `merge` by `merge` patches."""
        rows, columns = self.grid
        return rows * columns // self.merge**2


class Initialiser:
    """Fills a state dict from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: dict[str, torch.Tensor] = {}

    def normal(self, name: str, size: tuple[int, ...], scale: float) -> None:
        self.weights[name] = torch.randn(size, generator=self.generator) * scale

    def linear(self, name: str, out_width: int, in_width: int, bias: bool = False) -> None:
        self.normal(f"{name}.weight", (out_width, in_width), 0.8 / math.sqrt(in_width))
        if bias:
            self.weights[f"{name}.bias"] = torch.zeros(out_width)

    def constant(self, name: str, size: tuple[int, ...], value: float) -> None:
        self.weights[name] = torch.full(size, value)

    def layer_norm(self, name: str, width: int) -> None:
        self.constant(f"{name}.weight", (width,), 1.0)
        self.constant(f"{name}.bias", (width,), 0.0)

    def uniform(self, count: int, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=self.generator)
