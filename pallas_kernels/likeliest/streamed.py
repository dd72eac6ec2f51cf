"""The most likely token of each row, for Hopper (Mosaic GPU backend; `pallas_kernels.hopper`).

Rows are filled up to as many as its products take. A program keeps the products of all rows with
some rows of the table in registers and stores the largest, and where it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.hopper import ROWS, Tile
from pallas_kernels.likeliest.gpu import merged
from pallas_kernels.tiles import power_of_two

# Ids are counted in fp32, in which warp groups find maxima.
MOST_TOKENS = 2**24


def padded(rows: int) -> int:
    """The fewest rows, not fewer than `rows`, that the products take or would take."""
    return max(ROWS, power_of_two(rows))


def takes(rows: int, tokens: int, width: int, dtype: DTypeLike) -> bool:
    """Whether the kernel takes `rows` and a table `[tokens, width]`."""
    counted = tokens <= MOST_TOKENS and tokens % 128 == 0
    return counted and hopper.takes(padded(rows), width, tokens, dtype, hopper.MOST_ROWS)


def own_tile(rows: int, tokens: int) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200."""
    columns, blocks = 256 if tokens % 256 == 0 else 128, padded(rows) // hopper.HELD
    over_columns = 2 if tokens // columns % 2 == 0 else 1
    return Tile(columns=columns, steps=4, cluster=blocks if blocks > 1 else over_columns)


def likeliest(
    x: Float[Array, "R D"],
    table: Float[Array, "V D"],
    vocabulary: int | None,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Int[Array, " R"]:
    """`pallas_kernels.likeliest`."""
    (R, _), V = x.shape, len(table)
    count = min(V, vocabulary or V)
    rows = padded(R)
    tile = tile or own_tile(R, V)
    shape = (1, rows, V)

    def likeliest(
        tile: Tile, x_ref: Any, table_ref: Any, best_ref: Any, ids_ref: Any, *tiles: Any
    ) -> None:
        def store(sums: Array, _: Array, place: Array, own: Array, block: Array) -> None:
            first = (place * tile.columns).astype(jnp.float32)
            token = first + lax.broadcasted_iota(jnp.float32, sums.shape, 1)
            made = jnp.where(token < count, sums, -jnp.inf)
            best = jnp.max(made, axis=1)
            # Not "equal to": where products are no numbers the id must still be one of the table's.
            worse = made < lax.broadcast_in_dim(best, made.shape, (0,))
            lowest = -jnp.max(jnp.where(worse, -jnp.inf, -token), axis=1)
            here = pl.ds(pl.multiple_of(own, ROWS), ROWS)
            there = pl.ds(pl.multiple_of(block + own, ROWS), ROWS)
            for held, value in zip(tiles, (best, lowest), strict=True):
                held[here] = value
            plgpu.commit_smem()
            for held, out_ref in zip(tiles, (best_ref, ids_ref), strict=True):
                plgpu.copy_smem_to_gmem(held.at[here], out_ref.at[place, there])
            plgpu.wait_smem_to_gmem(0)

        hopper.stream(tile, shape, x_ref, table_ref, store, transposed=True)

    each = jax.ShapeDtypeStruct((V // tile.columns, rows), jnp.float32)
    held = plgpu.SMEM((min(rows, hopper.HELD),), jnp.float32)
    best, ids = hopper.launch(
        likeliest, (jnp.pad(x, ((0, rows - R), (0, 0))), table), tile, shape, [each, each],
        [held, held], interpret=interpret,
    )  # fmt: skip
    return merged(best[:, :R], ids[:, :R]).astype(jnp.int32)
