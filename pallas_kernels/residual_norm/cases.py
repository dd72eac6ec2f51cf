"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.norm import Kind, Norm


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, and what is asked for.

    more: rows of the parts beyond those of the stream.
    norm, post: kinds of the norms; None for no norm.
    weighted: whether norms have weights.
    """

    name: str
    rows: int
    width: int
    splits: int
    more: int = 0
    norm: Kind | None = "zero_centred"
    post: Kind | None = None
    weighted: bool = True
    factor: bool = False

    def arguments(
        self, dtype: DTypeLike, seed: int
    ) -> tuple[tuple[Array, Array, Norm | None], dict[str, Any]]:
        """Positional and keyword arguments of the operation.

        Parts are fp32; a single one is a product's result, in `dtype`.
        """
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        def norm(kind: Kind | None) -> Norm | None:
            if kind is None:
                return None
            weight = jnp.asarray(0.3 * normal(self.width), dtype) if self.weighted else None
            return Norm(weight, 1e-6, kind)

        parts = normal(self.splits, self.rows + self.more, self.width)
        parts[:, self.rows :] = np.nan
        x = jnp.asarray(2 * normal(self.rows, self.width), dtype)
        made = jnp.asarray(parts, dtype if self.splits == 1 else jnp.float32)
        options = {
            "post": norm(self.post),
            "factor": jnp.asarray([0.7], dtype) if self.factor else None,
        }
        return (x, made, norm(self.norm)), options


SMALL = (
    Case(name="qwen35", rows=3, width=48, splits=4),
    Case(name="one_row_of_two", rows=1, width=32, splits=2, more=1),
    Case(name="draft", rows=5, width=96, splits=2, norm="rounded"),
    Case(name="gemma", rows=2, width=80, splits=2, norm="plain", post="plain"),
    Case(name="gemma_gate", rows=3, width=32, splits=4, norm=None, post="plain"),
    Case(name="gemma_end", rows=7, width=32, splits=2, norm="plain", post="plain", factor=True),
    Case(name="no_weights", rows=2, width=64, splits=2, norm="plain", post="plain", weighted=False),
    Case(name="one_part", rows=9, width=48, splits=1),
    Case(name="sum_only", rows=2, width=32, splits=2, norm=None),
)
"""For the interpreter: every norm, every option, odd numbers of rows."""

SERVED = (
    Case(name="qwen35_plain", rows=1, width=2560, splits=8, more=1),
    Case(name="qwen35_verify", rows=16, width=2560, splits=8),
    Case(name="qwen35_verify_8", rows=128, width=2560, splits=8),
    Case(name="qwen35_prefill", rows=1000, width=2560, splits=1),
    Case(name="qwen3_8b", rows=16, width=4096, splits=4),
    Case(name="draft_plain", rows=16, width=2560, splits=8, norm="rounded"),
    Case(name="gemma_attention", rows=16, width=2560, splits=8, norm="plain", post="plain"),
    Case(name="gemma_mlp", rows=1, width=2560, splits=8, more=1, norm=None, post="plain"),
    Case(name="gemma_end", rows=16, width=2560, splits=4, norm="plain", post="plain", factor=True),
    Case(name="gemma_e2b", rows=16, width=1536, splits=8, norm="plain", post="plain"),
)
"""Widths of the published models: for a card."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product before the operation, to time both together."""

    name: str
    width_in: int
    width_out: int = 2560
    norm: Kind = "zero_centred"
    post: Kind | None = None

    def arguments(self, dtype: DTypeLike, rows: int, layers: int) -> tuple[Array, Array, list[Any]]:
        """The stream, inputs, and of each layer its weights and both norms."""
        keys = iter(jax.random.split(jax.random.key(0), 2 + 3 * layers))

        def normal(*shape: int) -> Array:
            return jax.random.normal(next(keys), shape, jnp.dtype(dtype))

        def norm(kind: Kind | None) -> Norm | None:
            return None if kind is None else Norm(0.3 * normal(self.width_out), 1e-6, kind)

        x, inputs = normal(rows, self.width_out), normal(rows, self.width_in)
        made = [
            (
                self.width_in**-0.5 * normal(self.width_in, self.width_out),
                (norm(self.norm), norm(self.post)),
            )
            for _ in range(layers)
        ]
        return x, inputs, made


PRODUCTS = (
    Product(name="qwen35_o", width_in=4096),
    Product(name="qwen35_down", width_in=9216),
    Product(name="gemma_o", width_in=2048, norm="plain", post="plain"),
    Product(name="gemma_down", width_in=10240, norm="plain", post="plain"),
)
"""Those of the published models that end in the stream."""
