"""Both products of a gated feed-forward layer and what joins them as one Pallas kernel for NVIDIA
GPUs (Triton backend; Mosaic GPU for the rows that `pallas_kernels.hopper` takes).

A program makes some columns of gate and the same ones of up, over all rows of a tile: each weight
is read once where the rows fit one tile. XLA needs a launch more, which also writes and reads both
products.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.gated_product.reference import Activation, activate
from pallas_kernels.tiles import LEAST, divisor, dot, power_of_two

MOST_ROWS = 128


@dataclass(frozen=True)
class Tile:
    """Work of a program: rows, columns of each product, weights of a column at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def obstacle(width_in: int, columns: int) -> str | None:
    """Why the kernel cannot take a matrix `[width_in, columns]` of both products."""
    for name, width in (("inner", width_in), ("outer", columns // 2)):
        if width % LEAST:
            return f"{name} width {width} is no multiple of {LEAST}"
    return None


def own_tile(rows: int, width_in: int, columns: int, dtype: Any) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200."""
    held = min(max(LEAST, power_of_two(rows)), MOST_ROWS)
    if jnp.dtype(dtype).itemsize == 4:
        # fp32 products use no tensor cores: small tiles, or registers spill.
        return Tile(LEAST, LEAST, divisor(width_in, 2 * LEAST), 4, 1)
    return Tile(
        rows=held, columns=divisor(columns, 64), inner=divisor(width_in, 64),
        warps=8 if held > 64 else 4, stages=4,
    )  # fmt: skip


def _joined(activation: Activation, dtype: Any, gate: Array, up: Array) -> Array:
    """Of the fp32 products, each rounded to `dtype` first."""
    gate, up = gate.astype(dtype), up.astype(dtype)
    wide = jnp.float32
    return (activate(gate, activation).astype(wide) * up.astype(wide)).astype(dtype)


def _program(
    tile: Tile, activation: Activation, rows: int, x_ref: Any, gate_ref: Any, up_ref: Any,
    out_ref: Any,
) -> None:  # fmt: skip
    row = pl.program_id(0) * tile.rows + jnp.arange(tile.rows)
    # Rows past the end are copies of the last: nothing needs a mask until the result is stored.
    at = jnp.minimum(row, rows - 1)[:, None]

    def multiply(step: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        start = step * tile.inner
        x = plt.load(x_ref.at[at, (start + jnp.arange(tile.inner))[None, :]])
        inner = pl.ds(start, tile.inner)
        gate, up = sums
        return gate + dot(x, plt.load(gate_ref.at[inner])), up + dot(x, plt.load(up_ref.at[inner]))

    nothing = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    steps = x_ref.shape[1] // tile.inner
    gate, up = lax.fori_loop(0, steps, multiply, (nothing, nothing))
    made = _joined(activation, out_ref.dtype, gate, up)
    real = jnp.broadcast_to((row < rows)[:, None], made.shape)
    columns = jnp.arange(tile.columns)[None, :]
    plt.store(out_ref.at[row[:, None], columns], made, mask=real)


def gated_product(
    x: Float[Array, "R K"],
    matrix: Float[Array, "K N"],
    activation: Activation,
    *,
    tile: Tile | hopper.Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """`pallas_kernels.gated_product`; the kind of `tile` says by which backend."""
    (R, K), F = x.shape, matrix.shape[1] // 2
    if isinstance(tile, hopper.Tile):
        join = functools.partial(_joined, activation, x.dtype)
        return hopper.streamed_product(
            x, matrix, join, sides=2, dtype=x.dtype, tile=tile, interpret=interpret
        )[0]
    tile = tile or own_tile(R, K, F, x.dtype)
    tiles = F // tile.columns
    return pl.pallas_call(
        functools.partial(_program, tile, activation, R),
        # Tiles of rows one after the other: the second finds the weights in the cache.
        grid=(pl.cdiv(R, tile.rows), tiles),
        in_specs=[
            pl.BlockSpec((R, K), lambda *_: (0, 0)),
            pl.BlockSpec((K, tile.columns), lambda _, i: (0, i)),
            pl.BlockSpec((K, tile.columns), lambda _, i: (0, i + tiles)),
        ],
        out_specs=pl.BlockSpec((R, tile.columns), lambda _, i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((R, F), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="gated_product",
    )(x, matrix, matrix)
