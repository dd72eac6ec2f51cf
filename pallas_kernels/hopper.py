"""Products of as many rows as a tensor core takes at once, for Hopper (Mosaic GPU backend).

A program makes some columns. One of its warp groups copies weights and rows into shared memory
ahead of time (TMA), the others multiply, 64 rows each, and keep their sums in registers. The
programs of a cluster copy the rows once for all of them: at 128 rows these are as many bytes as the
weights of 128 columns. After jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu (jax 0.11), whose
products have neither parts nor sides.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.choose import PROCESSORS, compute_capability

ROWS = 64
"""Of a warp group's product."""
INNER = 64
"""Weights of a column at a time: the widest rows that the swizzle of shared memory takes."""
MOST_GROUPS = 2
SHARED_BYTES, MOST_STEPS = 231_000, 8
"""What a program may take of an H200's shared memory, and the most copies under way in it."""
LEAST_STEPS = 4
"""Of a part: fewer would be over before the copies keep up."""


@dataclass(frozen=True)
class Tile:
    """Work of a program: columns of each side, copies under way, programs that share their rows."""

    columns: int
    steps: int
    cluster: int


def fits(rows: int) -> bool:
    """Whether there is a kernel for so many rows, and no other device than it is for."""
    capability = compute_capability()
    return rows in range(ROWS, ROWS * MOST_GROUPS + 1, ROWS) and (
        capability is None or capability.startswith("9.")
    )


def obstacle(rows: int, width_in: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot make `columns` of each side from `[rows, width_in]`."""
    if not fits(rows):
        return f"{rows} rows are neither {ROWS} nor {ROWS * MOST_GROUPS}, or this is no Hopper GPU"
    for name, width in (("inner", width_in), ("outer", columns)):
        if width % INNER:
            return f"{name} width {width} is no multiple of {INNER}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"{jnp.dtype(dtype)} has not 16 bits"
    return None


def number_of_parts(width_in: int, width_out: int) -> int:
    """Into how many parts to cut a product: a power of two that gives each processor one program
    at most, and each program four steps at least."""
    tiles = width_out // own_tile(ROWS, width_out, 1, jnp.float32).columns
    parts = 1
    while 2 * parts * tiles <= PROCESSORS and width_in % (2 * parts * INNER) == 0:
        if 2 * parts * LEAST_STEPS * INNER > width_in:
            break
        parts *= 2
    return parts


def own_tile(rows: int, columns: int, sides: int, dtype: DTypeLike) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200, for results in
    `dtype`."""
    width = 128 if columns % 128 == 0 else INNER
    left = SHARED_BYTES - rows * width * jnp.dtype(dtype).itemsize
    return Tile(
        columns=width, steps=min(left // (2 * INNER * (rows + sides * width)), MOST_STEPS),
        cluster=2 if columns // width % 2 == 0 else 1,
    )  # fmt: skip


def _swizzled(width: int, dtype: DTypeLike) -> tuple[Any, ...]:
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def _program(
    tile: Tile, sides: int, finish: Callable[..., Array], x_ref: Any, matrix_ref: Any,
    out_ref: Any, out_tile: Any,
) -> None:  # fmt: skip
    (R, K), (parts, _, N) = x_ref.shape, out_ref.shape
    place = lax.axis_index("tile") * tile.cluster + lax.axis_index("cluster")
    first = pl.multiple_of(place * tile.columns, tile.columns)
    share = K // parts
    part = lax.axis_index("part")
    inner = pl.ds(pl.multiple_of(part * share, INNER), share)
    rows = pl.ds(pl.multiple_of(lax.axis_index("group") * ROWS, ROWS), ROWS)

    def multiply(_: Any, x: Any, *rest: Any) -> Any:
        *weights, sums = rest
        for total, one in zip(sums, weights, strict=True):
            plgpu.wgmma(total, x.at[rows], one)
        plgpu.wgmma_wait(0)
        return sums

    def compute(run: Callable[..., Any]) -> None:
        def scoped(*sums: Any) -> None:
            run(sums)
            out_tile[rows] = finish(*(total[...] for total in sums)).astype(out_ref.dtype)

        total = plgpu.ACC((ROWS, tile.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        pl.run_scoped(scoped, *[total] * sides)
        plgpu.commit_smem()
        made = out_ref.at[part, rows, pl.ds(first, tile.columns)]
        plgpu.copy_smem_to_gmem(out_tile.at[rows], made)
        plgpu.wait_smem_to_gmem(0)

    once = ("cluster",) if tile.cluster > 1 else ()
    row_spec = plgpu.BlockSpec(
        (R, INNER), lambda k: (0, k), transforms=_swizzled(INNER, x_ref.dtype),
        collective_axes=once, memory_space=plgpu.SMEM,
    )  # fmt: skip
    weight_spec = plgpu.BlockSpec(
        (INNER, tile.columns), lambda k: (k, 0), transforms=_swizzled(tile.columns, x_ref.dtype),
        memory_space=plgpu.SMEM,
    )  # fmt: skip
    pipeline = plgpu.emit_pipeline_warp_specialized(
        multiply, grid=(share // INNER,), in_specs=[row_spec, *[weight_spec] * sides],
        memory_registers=40, max_concurrent_steps=tile.steps, wg_axis="group",
        num_compute_wgs=R // ROWS, compute_context=compute,
    )  # fmt: skip
    of_sides = [
        matrix_ref.at[inner, pl.ds(pl.multiple_of(side * N + first, INNER), tile.columns)]
        for side in range(sides)
    ]
    pipeline(x_ref.at[:, inner], *of_sides)


def streamed_product(
    x: Float[Array, "R K"],
    matrix: Float[Array, "K N"],
    finish: Callable[..., Array],
    *,
    sides: int = 1,
    parts: int = 1,
    dtype: DTypeLike,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "S R F"]:
    """What `finish` makes, inside the kernel, of the fp32 products of `x` with each side of
    `matrix`, its columns cut into `sides`; for each of `parts` shares of the inner axis, which its
    `INNER` must divide."""
    R, F = len(x), matrix.shape[1] // sides
    tile = tile or own_tile(R, F, sides, dtype)
    options: dict[str, Any] = {}
    if interpret:
        # In `plgpu` from jax 0.11 on; before, it knows no barriers of a cluster.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        options["interpret"] = InterpretGPUParams()
        if jax.__version_info__ < (0, 11):
            tile = dataclasses.replace(tile, cluster=1)
    out_tile = plgpu.SMEM((R, tile.columns), dtype, transforms=_swizzled(tile.columns, dtype))
    return plgpu.kernel(
        functools.partial(_program, tile, sides, finish),
        out_type=jax.ShapeDtypeStruct((parts, R, F), dtype),
        scratch_types=[out_tile],
        grid=(F // tile.columns // tile.cluster, parts), grid_names=("tile", "part"),
        cluster=(tile.cluster,), cluster_names=("cluster",),
        num_threads=R // ROWS + 1, thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **options,
    )(x, matrix)  # fmt: skip
