"""A step of the gated delta rule on NVIDIA GPUs (Pallas, Triton backend): what is launched.

A token after a token is one kernel (`gpu_token`), a block two (`gpu_block`). Both take the new
tokens' convolution inputs from where a projection left them and put them into the ring themselves.
State, records and ring are updated in place.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import gpu_block, gpu_token
from pallas_kernels.gated_delta.gpu_inputs import Sizes

# The smallest side of a tensor-core product.
LEAST = 16
# Streaming multiprocessors of an H200.
PROCESSORS = 132


def obstacle(ring: Array, kernel: Array, state: Array, update: Array) -> str | None:
    """Why the kernel cannot take these arguments."""
    for name, width in zip(("key", "value"), state.shape[2:], strict=True):
        if width < LEAST or width & (width - 1):
            return f"{name} width {width} is no power of two from {LEAST} on"
    needed = kernel.shape[0] - 1 + 2 * update.shape[2]
    if ring.shape[1] < needed:
        return f"a ring of {ring.shape[1]} slots is smaller than the {needed} of two blocks"
    return None


@dataclass(frozen=True)
class Tile:
    """How a block is cut up.

    columns: of the state, of one program of `advance`.
    keys: rows of the state that it has in registers at a time.
    warps: of a program of `advance`.
    prepare_warps: of a program of `prepare`.
    """

    columns: int
    keys: int
    warps: int
    prepare_warps: int


def own_tile(rows: int, heads: int, value_width: int) -> Tile:
    """Wide tiles share what they read beside the state; narrow ones keep all processors busy."""
    columns = min(64, value_width)
    while columns > LEAST and rows * heads * (value_width // columns) < PROCESSORS:
        columns //= 2
    return Tile(columns=columns, keys=64, warps=columns // LEAST, prepare_warps=4)


@dataclass(frozen=True)
class _Blocks:
    """Blocks of a program's row and head; `place` gives both from the indices of the grid."""

    place: Callable[..., tuple[Any, Any]]
    column: Callable[..., Any] = lambda *_: 0

    def row(self, *shape: int) -> pl.BlockSpec:
        """All of a batch row."""
        return pl.BlockSpec((None, *shape), lambda *i: (self.place(*i)[0], *(0 for _ in shape)))

    def head(self, *shape: int, group: int = 1) -> pl.BlockSpec:
        """All of a head; of the head that `group` heads share."""

        def index(*i: Any) -> tuple[Any, ...]:
            row, head = self.place(*i)
            return row, head // group, *(0 for _ in shape)

        return pl.BlockSpec((None, None, *shape), index)

    def columns(self, height: int, width: int) -> pl.BlockSpec:
        """Some columns of a matrix of a head."""
        return pl.BlockSpec(
            (None, None, height, width), lambda *i: (*self.place(*i), 0, self.column(*i))
        )

    def tokens(self, T: int, *width: int, first: int = 0) -> pl.BlockSpec:
        """A head's column, or columns, for each token; heads count from `first`."""

        def index(*i: Any) -> tuple[Any, ...]:
            row, head = self.place(*i)
            return row, 0, first + head, *(self.column(*i) for _ in width)

        return pl.BlockSpec((None, T, None, *width), index)

    def of_head(self) -> pl.BlockSpec:
        return pl.BlockSpec((1,), lambda *i: (self.place(*i)[1],))

    def of_row(self) -> pl.BlockSpec:
        return pl.BlockSpec((1,), lambda *i: (self.place(*i)[0],))


def gated_delta_step(
    ring: Float[Array, "B slots channels"],
    projected: Float[Array, "B T width"],
    kernel: Float[Array, "taps channels"],
    A_log: Float[Array, " vh"],
    dt_bias: Float[Array, " vh"],
    state: Float[Array, "B vh kd vd"],
    update: Float[Array, "B vh P vd"],
    G: Float[Array, "B vh P"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    pending: Int[Array, " B"],
    *,
    key_heads: int,
    interpret: bool = False,
    tile: Tile | None = None,
    token_warps: int = 8,
    parts: int | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """`pallas_kernels.gated_delta_step`.

    `parts` of an fp32 side beside one of the ring's dtype: 3 keep fp32 whole, 2 leave the state
    2e-6 of its largest value off.
    """
    B, T, width = projected.shape
    vh, kd, vd = state.shape[1:]
    records = update.shape[2]
    padded = 1 if records == 1 else max(LEAST, 1 << (records - 1).bit_length())
    sizes = Sizes(
        T=T, records=records, P=padded, taps=kernel.shape[0], slots=ring.shape[1],
        key_heads=key_heads, value_heads=vh, kd=kd, vd=vd, interpret=interpret,
    )  # fmt: skip
    at = _Blocks(lambda i: (i // vh, i % vh))
    inputs = (ring, projected, kernel, *[projected] * 2, A_log, dt_bias, length, count, pending, G)
    of_ring, of_G = at.row(*ring.shape[1:]), at.head(records)
    specs = [
        of_ring, at.row(T, width), pl.BlockSpec(kernel.shape, lambda *_: (0, 0)),
        at.tokens(T, first=width - vh), at.tokens(T, first=width - 2 * vh), at.of_head(), at.of_head(), at.of_row(), at.of_row(),
        at.of_row(), of_G,
    ]  # fmt: skip
    tile = own_tile(B, vh, vd) if tile is None else tile
    parts = gpu_block.parts_for(ring.dtype) if parts is None else parts
    out = jax.ShapeDtypeStruct((B, T, vh, vd), ring.dtype)

    def shaped(*arrays: Array) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    if padded == 1:
        states, updates = at.columns(kd, vd), at.columns(1, vd)
        ring, G, out, state, update = pl.pallas_call(
            functools.partial(gpu_token.step, sizes),
            grid=(B * vh,),
            in_specs=[*specs, states, updates],
            out_specs=[of_ring, of_G, at.tokens(T, vd), states, updates],
            out_shape=[*shaped(ring, G), out, *shaped(state, update)],
            input_output_aliases={0: 0, 10: 1, 11: 3, 12: 4},
            compiler_params=plt.CompilerParams(num_warps=token_warps, num_stages=1),
            interpret=interpret,
            name="gated_delta_token",
        )(*inputs, state, update)
        return out, state, update, G, ring

    def made(*shape: int, dtype: Any = ring.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B, *shape), dtype)

    ring, G, sides, v, scales, matrices = pl.pallas_call(
        functools.partial(gpu_block.prepare, sizes),
        grid=(B * vh,),
        in_specs=specs,
        out_specs=[
            of_ring, of_G, at.head(3, padded, kd, group=sizes.group), at.head(padded, vd),
            at.head(4, padded), at.head(2, parts, padded, padded),
        ],
        out_shape=[
            *shaped(ring, G), made(key_heads, 3, padded, kd), made(vh, padded, vd),
            made(vh, 4, padded, dtype=jnp.float32), made(vh, 2, parts, padded, padded),
        ],
        input_output_aliases={0: 0, 10: 1},
        compiler_params=plt.CompilerParams(num_warps=tile.prepare_warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_prepare",
    )(*inputs)  # fmt: skip
    at = _Blocks(lambda column, i: (i // vh, i % vh), lambda column, i: column)
    states, updates = at.columns(kd, tile.columns), at.columns(records, tile.columns)
    out, state, update = pl.pallas_call(
        functools.partial(gpu_block.advance, sizes, parts, min(tile.keys, kd)),
        grid=(vd // tile.columns, B * vh),
        in_specs=[
            states, updates, at.head(3, padded, kd, group=sizes.group),
            at.columns(padded, tile.columns), at.head(4, padded),
            at.head(2, parts, padded, padded), at.of_row(),
        ],
        out_specs=[at.tokens(T, tile.columns), states, updates],
        out_shape=[out, *shaped(state, update)],
        input_output_aliases={0: 1, 1: 2},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_advance",
    )(state, update, sides, v, scales, matrices, pending)  # fmt: skip
    return out, state, update, G, ring
