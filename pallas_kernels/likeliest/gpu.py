"""The most likely token of each row as a Pallas kernel for NVIDIA GPUs (Triton backend).

A program multiplies all rows of a tile with some rows of the table and keeps the largest product of
each row, so that logits never reach memory: with 128 rows and 262,144 tokens they are 134 MB beside
1.3 GB of table, written and read again.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.tiles import LEAST, divisor, dot, power_of_two

MOST_ROWS = 128
# Places in the table are counted with 32 bits.
MOST_NUMBERS = jnp.iinfo(jnp.int32).max
# Above every id.
NOWHERE = jnp.iinfo(jnp.int32).max


@dataclass(frozen=True)
class Tile:
    """Work of a program: rows, tokens, weights of a token at a time."""

    rows: int
    tokens: int
    inner: int
    warps: int
    stages: int


def obstacle(tokens: int, width: int) -> str | None:
    """Why the kernel cannot take a table `[tokens, width]`."""
    if width % LEAST:
        return f"width {width} is no multiple of {LEAST}"
    if tokens * width > MOST_NUMBERS:
        return f"a table of {tokens} x {width} has more than {MOST_NUMBERS} numbers"
    return None


def own_tile(rows: int, width: int, dtype: Any) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200."""
    inner = divisor(width, 64)
    if jnp.dtype(dtype).itemsize == 4:
        # fp32 products use no tensor cores: small tiles, or registers spill.
        return Tile(LEAST, LEAST, min(inner, 2 * LEAST), 4, 1)
    held = min(max(LEAST, power_of_two(rows)), MOST_ROWS)
    if held > 64:
        # Rows are read once for each tile of tokens: 397 us in place of 424 for Gemma 4's head.
        return Tile(rows=held, tokens=256, inner=inner, warps=8, stages=3)
    return Tile(rows=held, tokens=128, inner=inner, warps=4, stages=4)


def _program(
    tile: Tile, rows: int, vocabulary: int, x_ref: Any, table_ref: Any, best_ref: Any, ids_ref: Any
) -> None:
    row = pl.program_id(0) * tile.rows + jnp.arange(tile.rows)
    token = pl.program_id(1) * tile.tokens + jnp.arange(tile.tokens)
    # Past the ends the last one is taken again: nothing needs a mask until all is summed.
    at, of = jnp.minimum(row, rows - 1)[:, None], jnp.minimum(token, vocabulary - 1)[:, None]

    def multiply(step: Any, total: Array) -> Array:
        inner = (step * tile.inner + jnp.arange(tile.inner))[None, :]
        return total + dot(plt.load(x_ref.at[at, inner]), plt.load(table_ref.at[of, inner]).T)

    nothing = jnp.zeros((tile.rows, tile.tokens), jnp.float32)
    total = lax.fori_loop(0, x_ref.shape[1] // tile.inner, multiply, nothing)
    # A token that is taken again has its own product, and a higher number: it never wins.
    best = jnp.max(total, axis=1)
    tokens = jnp.broadcast_to(token[None, :], total.shape)
    # Not "equal to": where products are no numbers the id must still be one of the table's.
    first = jnp.min(jnp.where(total < best[:, None], NOWHERE, tokens), axis=1)
    plt.store(best_ref.at[row], best, mask=row < rows)
    plt.store(ids_ref.at[row], first, mask=row < rows)


def likeliest(
    x: Float[Array, "R D"],
    table: Float[Array, "V D"],
    vocabulary: int | None,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Int[Array, " R"]:
    """`pallas_kernels.likeliest`."""
    (R, D), V = x.shape, min(table.shape[0], vocabulary or table.shape[0])
    tile = tile or own_tile(R, D, table.dtype)
    tiles = pl.cdiv(V, tile.tokens)
    own = pl.BlockSpec((None, R), lambda _, i: (i, 0))
    best, ids = pl.pallas_call(
        functools.partial(_program, tile, R, V),
        # Tiles of rows one after the other: the second finds the table's in the cache.
        grid=(pl.cdiv(R, tile.rows), tiles),
        in_specs=[
            pl.BlockSpec((R, D), lambda *_: (0, 0)),
            pl.BlockSpec(table.shape, lambda *_: (0, 0)),
        ],
        out_specs=[own, own],
        out_shape=[
            jax.ShapeDtypeStruct((tiles, R), jnp.float32),
            jax.ShapeDtypeStruct((tiles, R), jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="likeliest",
    )(x, table)
    return merged(best, ids)


def merged(best: Array, ids: Array) -> Array:
    """The id that goes with the largest product of all tiles `[tiles, R]`; of equal ones the first
    tile's, which holds the lowest id."""
    first = jnp.argmax(best, axis=0)
    return jnp.take_along_axis(ids, first[None], axis=0)[0]
