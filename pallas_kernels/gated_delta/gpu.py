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

from pallas_kernels.choose import PROCESSORS
from pallas_kernels.gated_delta import gpu_block, gpu_token
from pallas_kernels.gated_delta.gpu_inputs import Sizes
from pallas_kernels.tiles import LEAST, power_of_two


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


def own_token_tile(rows: int, heads: int, value_width: int) -> tuple[int, int]:
    """For a token after a token: columns of the state that a program has in registers at a time,
    and its warps. Where programs outnumber processors small ones run side by side: some load while
    others compute."""
    return min(64, value_width), 8 if rows * heads <= PROCESSORS else 4


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
    token_tile: tuple[int, int] | None = None,
    parts: int | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """`pallas_kernels.gated_delta_step`.

    `parts` of an fp32 side beside one of the ring's dtype: 3 keep fp32 whole, 2 leave the state
    2e-6 of its largest value off.
    """
    B, T, width = projected.shape
    vh, kd, vd = state.shape[1:]
    records = update.shape[2]
    sizes = Sizes(
        T=T, records=records, P=1 if records == 1 else max(LEAST, power_of_two(records)),
        taps=kernel.shape[0], slots=ring.shape[1], key_heads=key_heads, value_heads=vh, kd=kd,
        vd=vd, interpret=interpret,
    )  # fmt: skip
    at = _Blocks(lambda i: (i // vh, i % vh))
    # The projection three times: inputs of the convolution, decays, write strengths.
    tokens = (ring, projected, kernel, projected, projected, A_log, dt_bias)
    specs = [
        at.row(*ring.shape[1:]), at.row(T, width), pl.BlockSpec(kernel.shape, lambda *_: (0, 0)),
        at.tokens(T, first=width - vh), at.tokens(T, first=width - 2 * vh), at.of_head(),
        at.of_head(), at.of_row(), at.of_row(), at.of_row(), at.head(records),
    ]  # fmt: skip
    front = _Front((*tokens, length, count, pending, G), specs, at)
    if sizes.P == 1:
        columns, warps = token_tile or own_token_tile(B, vh, vd)
        return _token(sizes, front, state, update, columns, warps)
    tile = own_tile(B, vh, vd) if tile is None else tile
    parts = gpu_block.parts_for(ring.dtype) if parts is None else parts
    return _block(sizes, front, state, update, tile, parts)


@dataclass(frozen=True)
class _Front:
    """What both forms take in first, the ring as the first and the running decay as the last; they
    give these two back first. A program takes a head of a row."""

    inputs: tuple[Array, ...]
    specs: list[pl.BlockSpec]
    at: _Blocks

    @property
    def outputs(self) -> tuple[list[pl.BlockSpec], list[jax.ShapeDtypeStruct], dict[int, int]]:
        """Their blocks, shapes and aliases."""
        last = len(self.inputs) - 1
        shapes = [_shape_of(self.inputs[0]), _shape_of(self.inputs[last])]
        return [self.specs[0], self.specs[last]], shapes, {0: 0, last: 1}


def _shape_of(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _out(sizes: Sizes, ring: Array) -> jax.ShapeDtypeStruct:
    shape = (ring.shape[0], sizes.T, sizes.value_heads, sizes.vd)
    return jax.ShapeDtypeStruct(shape, ring.dtype)


def _launch(
    sizes: Sizes, kernel: Callable[..., None], name: str, warps: int, **options: Any
) -> Callable[..., Any]:
    return pl.pallas_call(
        kernel,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=sizes.interpret,
        name=name,
        **options,
    )


def _token(
    sizes: Sizes, front: _Front, state: Array, update: Array, columns: int, warps: int
) -> tuple[Array, Array, Array, Array, Array]:
    """A token after a token."""
    specs, shapes, aliases = front.outputs
    states, updates = front.at.columns(sizes.kd, sizes.vd), front.at.columns(1, sizes.vd)
    after = len(front.inputs)
    ring, G, out, state, update = _launch(
        sizes,
        functools.partial(gpu_token.step, sizes, columns),
        "gated_delta_token",
        warps,
        grid=(len(state) * sizes.value_heads,),
        in_specs=[*front.specs, states, updates],
        out_specs=[*specs, front.at.tokens(sizes.T, sizes.vd), states, updates],
        out_shape=[*shapes, _out(sizes, front.inputs[0]), _shape_of(state), _shape_of(update)],
        input_output_aliases={**aliases, after: 3, after + 1: 4},
    )(*front.inputs, state, update)
    return out, state, update, G, ring


def _block(
    sizes: Sizes, front: _Front, state: Array, update: Array, tile: Tile, parts: int
) -> tuple[Array, Array, Array, Array, Array]:
    """A block after a block."""
    P, kd, vh, vd, dtype = sizes.P, sizes.kd, sizes.value_heads, sizes.vd, front.inputs[0].dtype
    programs = len(state) * vh

    def made(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(state), *shape), dtype)

    def small(at: _Blocks) -> list[pl.BlockSpec]:
        """Keys and queries, scales, matrices."""
        sides = at.head(3, P, kd, group=sizes.group)
        return [sides, at.head(4, P), at.head(2, parts, P, P)]

    specs, shapes, aliases = front.outputs
    ring, G, *between = _launch(
        sizes,
        functools.partial(gpu_block.prepare, sizes),
        "gated_delta_prepare",
        tile.prepare_warps,
        grid=(programs,),
        in_specs=front.specs,
        out_specs=[*specs, *small(front.at), front.at.head(P, vd)],
        out_shape=[
            *shapes, made(sizes.key_heads, 3, P, kd), made(vh, 4, P, dtype=jnp.float32),
            made(vh, 2, parts, P, P), made(vh, P, vd),
        ],
        input_output_aliases=aliases,
    )(*front.inputs)  # fmt: skip
    at = _Blocks(lambda _, i: (i // vh, i % vh), lambda column, _: column)
    states, updates = at.columns(kd, tile.columns), at.columns(sizes.records, tile.columns)
    pending = front.inputs[-2]
    out, state, update = _launch(
        sizes,
        functools.partial(gpu_block.advance, sizes, parts, min(tile.keys, kd)),
        "gated_delta_advance",
        tile.warps,
        grid=(vd // tile.columns, programs),
        in_specs=[states, updates, *small(at), at.columns(P, tile.columns), at.of_row()],
        out_specs=[at.tokens(sizes.T, tile.columns), states, updates],
        out_shape=[_out(sizes, ring), _shape_of(state), _shape_of(update)],
        input_output_aliases={0: 1, 1: 2},
    )(state, update, *between, pending)
    return out, state, update, G, ring
