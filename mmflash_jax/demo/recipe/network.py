"""What the training networks of the families share: static shapes, fit for a CUDA graph.

transformers' own classes do work in Python for every row and picture, which leaves a GPU idle at
this size. Here every prompt starts the same way, is padded on the right and holds one picture, so
positions and masks are constants. Parameter names are transformers' own; `tests/demo` checks the
logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.recipe.shape import TargetShape

TEXT_PREFIX = "model.language_model."
EPSILON = 1e-6

ShapeT = TypeVar("ShapeT", bound=TargetShape)


def project(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the dtype of its input; master weights stay float32."""
    bias = None if bias is None else bias.to(inputs.dtype)
    return functional.linear(inputs, weight.to(inputs.dtype), bias)


def inverse_rms(inputs: Tensor) -> Tensor:
    return torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + EPSILON)


def rotate_half(inputs: Tensor) -> Tensor:
    first, second = inputs.chunk(2, -1)
    return torch.cat((-second, first), -1)


def cosine_sine(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Of the angles repeated once, as half-split rope wants them."""
    doubled = torch.cat((angles, angles), -1)
    return doubled.cos(), doubled.sin()


class TargetNetwork(ABC, Generic[ShapeT]):
    """A whole model over float32 master weights; `dtype` is that of the matrix products."""

    # Ends of the names of values that are stored with the weights but not trained.
    constant_suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: ShapeT,
        prefix_length: int,
        length: int,
        device: str,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        self.shape, self.prefix_length, self.length = shape, prefix_length, length
        self.device, self.dtype, self.compiled = device, dtype, compiled
        self.weights: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        for name, value in weights.items():
            if self.constant_suffixes and name.endswith(self.constant_suffixes):
                self.constants[name] = value.to(device)
            else:
                self.weights[name] = value.to(device).requires_grad_()

    @abstractmethod
    def vision(self, images: Tensor) -> Tensor:
        """uint8[batch, height, width, 3] -> image features [batch, image_tokens, width]."""

    @abstractmethod
    def text(self, ids: Tensor, features: Tensor) -> Tensor:
        """Hidden states after the last norm; `features` replace the image pads."""

    def logits(self, hidden: Tensor) -> Tensor:
        table = self.weights[f"{TEXT_PREFIX}embed_tokens.weight"]
        return project(hidden.to(self.dtype), table).float()

    def state(self) -> dict[str, Tensor]:
        """Everything that belongs in the weight file."""
        return {**self.weights, **self.constants}

    def _wrap(self, function: Callable) -> Callable:
        """Compile for exactly the shapes that come; layers of one kind share the result."""
        return torch.compile(function, dynamic=False) if self.compiled else function

    def _block(self, prefix: str, names: tuple[str, ...]) -> dict[str, Tensor]:
        state = self.state()
        return {name: state[prefix + name] for name in names}

    def _look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        if self.device == "cpu":
            return functional.embedding(ids, table)
        # A product with one-hot rows: safe in a graph, and its backward is one product too.
        rows = torch.arange(table.shape[0], device=ids.device)
        one_hot = (ids[..., None] == rows).to(self.dtype)
        return functional.linear(one_hot, table.t().to(self.dtype)).float()

    def _with_image(self, hidden: Tensor, features: Tensor) -> Tensor:
        after_image = self.prefix_length + self.shape.image_tokens
        parts = (hidden[:, : self.prefix_length], features, hidden[:, after_image:])
        return torch.cat(parts, 1)
