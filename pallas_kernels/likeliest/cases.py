"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes.

    twice: every token stands in the table twice, half of it apart: all products are equal to one.
    """

    name: str
    rows: int
    width: int
    tokens: int
    vocabulary: int | None = None
    twice: bool = False

    def arguments(self, dtype: DTypeLike, seed: int) -> tuple[Array, Array]:
        """Rows and table; what is no token would be the most likely one."""
        keys = jax.random.split(jax.random.key(seed))
        x = jax.random.normal(keys[0], (self.rows, self.width), jnp.float32)
        table = jax.random.normal(keys[1], (self.tokens, self.width), jnp.float32)
        if self.vocabulary is not None:
            table = table.at[self.vocabulary :].set(100 * x[:1])
        if self.twice:
            half = self.tokens // 2
            table = table.at[half : 2 * half].set(table[:half])
        return x.astype(dtype), table.astype(dtype)


SMALL = (
    Case(name="one_tile", rows=16, width=64, tokens=128),
    Case(name="odd_sizes", rows=5, width=48, tokens=300),
    Case(name="padded_table", rows=3, width=32, tokens=320, vocabulary=289),
    Case(name="equal_products", rows=20, width=16, tokens=512, twice=True),
    Case(name="two_row_tiles", rows=130, width=16, tokens=200),
    Case(name="streamed", rows=33, width=128, tokens=512, vocabulary=300),
    Case(name="streamed_equal", rows=120, width=64, tokens=512, twice=True),
    Case(name="streamed_blocks", rows=240, width=64, tokens=384),
)
"""For the interpreter: ends of tiles each way, tokens that do not count, ties; some of them such
that `streamed.py` takes them in 16 bits."""

SERVED = (
    Case(name="qwen35_8", rows=128, width=2560, tokens=248_320),
    Case(name="qwen35", rows=16, width=2560, tokens=248_320),
    Case(name="qwen35_32", rows=512, width=2560, tokens=248_320),
    Case(name="gemma_8", rows=120, width=2560, tokens=262_144),
    Case(name="gemma_padded", rows=16, width=2560, tokens=262_144, vocabulary=262_100),
    Case(name="equal_products", rows=128, width=2560, tokens=262_144, twice=True),
)
"""Heads of the published models, and one whose ids are known exactly: for a card."""

TIMED = tuple(case for case in SERVED if case.name.endswith("_8"))
"""One for each head; rows are those of the batch that is timed."""
