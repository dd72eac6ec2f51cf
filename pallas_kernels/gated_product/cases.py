"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.gated_product.reference import Activation


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes: `columns` are those of each product."""

    name: str
    rows: int
    width_in: int
    columns: int
    activation: Activation = "silu"

    def arguments(self, dtype: DTypeLike, seed: int) -> tuple[Array, Array, Activation]:
        """Arguments of the operation."""
        keys = jax.random.split(jax.random.key(seed))
        x = jax.random.normal(keys[0], (self.rows, self.width_in), jnp.float32)
        matrix = jax.random.normal(keys[1], (self.width_in, 2 * self.columns), jnp.float32)
        matrix *= self.width_in**-0.5
        return x.astype(dtype), matrix.astype(dtype), self.activation


SMALL = (
    Case(name="one_tile", rows=16, width_in=64, columns=64),
    Case(name="odd_rows", rows=3, width_in=48, columns=80, activation="gelu_tanh"),
    Case(name="one_row", rows=1, width_in=16, columns=16, activation="gelu"),
    Case(name="two_row_tiles", rows=130, width_in=32, columns=48),
    Case(name="whole_rows", rows=64, width_in=128, columns=128),
    Case(name="all_rows", rows=128, width_in=192, columns=256, activation="gelu_tanh"),
    Case(name="several_blocks", rows=256, width_in=64, columns=192),
    Case(name="no_error_function", rows=64, width_in=64, columns=64, activation="gelu"),
)
"""For the interpreter: every activation, rows that do not fill a tile, several tiles each way, and
those that `pallas_kernels.hopper` takes in 16 bits."""

SERVED = (
    Case(name="qwen35", rows=16, width_in=2560, columns=9216),
    Case(name="qwen35_narrow", rows=5, width_in=2560, columns=9216),
    Case(name="qwen35_8", rows=128, width_in=2560, columns=9216),
    Case(name="draft", rows=16, width_in=2560, columns=9728),
    Case(name="gemma_4", rows=64, width_in=2560, columns=10240, activation="gelu_tanh"),
    Case(name="gemma_8", rows=128, width_in=2560, columns=10240, activation="gelu_tanh"),
    Case(name="gemma", rows=16, width_in=2560, columns=10240, activation="gelu_tanh"),
    Case(name="qwen35_16", rows=256, width_in=2560, columns=9216),
    Case(name="gemma_32", rows=512, width_in=2560, columns=10240, activation="gelu_tanh"),
    Case(name="gemma_plain", rows=1, width_in=2560, columns=10240, activation="gelu_tanh"),
    Case(name="gemma_e2b", rows=32, width_in=1536, columns=6144, activation="gelu_tanh"),
)
"""Widths of the published models: for a card."""

TIMED = tuple(case for case in SERVED if case.rows == 16)
"""One for each width; rows are those of the batch that is timed."""
