"""Products of as many rows as a tensor core takes at once, for Hopper (Mosaic GPU backend).

A program makes some columns. One of its warp groups copies weights and rows into shared memory
ahead of time (TMA), the others multiply, 64 rows each, and keep their sums in registers. The
programs of a cluster copy what they share once for all of them: up to 128 rows these are the rows,
as many bytes as the weights of 128 columns; beyond, where a program holds 128 of them, the weights.
After jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu (jax 0.11), whose products have no parts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.choose import PROCESSORS, Kernels, compute_capability, implementation
from pallas_kernels.tiles import shares

ROWS = 64
"""Of a warp group's product."""
INNER = 64
"""Weights of a column at a time: the widest rows that the swizzle of shared memory takes."""
HELD = 2 * ROWS
"""Rows of a program at most."""
MOST_ROWS = 4 * HELD
SHARED_BYTES, MOST_STEPS = 231_000, 8
"""What a program may take of an H200's shared memory, and the most copies under way in it."""
LEAST_STEPS = 4
"""Of a part: fewer would be over before the copies keep up."""


@dataclass(frozen=True)
class Tile:
    """Work of a program: columns, copies under way, programs that share copies."""

    columns: int
    steps: int
    cluster: int


def is_hopper() -> bool:
    """Whether the GPU in use is one; on other devices these kernels are interpreted."""
    capability = compute_capability()
    return capability is None or capability.startswith("9.")


def takes(rows: int, width_in: int, columns: int, dtype: DTypeLike, most: int = HELD) -> bool:
    """Whether the kernel makes `columns` from `[rows, width_in]`, for up to `most` rows."""
    whole = rows in (ROWS, HELD, 2 * HELD, MOST_ROWS) and rows <= most
    even = not (width_in % INNER or columns % INNER)
    return is_hopper() and whole and even and jnp.dtype(dtype).itemsize == 2


def is_streamed(rows: int, width_in: int, columns: int, dtype: DTypeLike, kernels: Kernels) -> bool:
    """Whether the kernel makes the parts of a product: it takes it, is wanted, and pays.

    With 64 rows XLA's are as fast (docs/performance.md).

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if rows != HELD or not takes(rows, width_in, columns, dtype):
        return False
    return implementation("streamed_product", kernels, dtype, None) != "reference"


def number_of_parts(width_in: int, width_out: int) -> int:
    """Into how many parts to cut a product: a power of two that gives each processor one program
    at most, and each program four steps at least."""
    tiles = width_out // own_tile(HELD, width_out, jnp.float32).columns
    return shares(width_in, PROCESSORS // tiles, multiple=INNER, least=LEAST_STEPS * INNER)


def own_tile(rows: int, columns: int, dtype: DTypeLike) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200, for results in
    `dtype`."""
    width = 128 if columns % 128 == 0 else INNER
    held = min(rows, HELD)
    left = SHARED_BYTES - held * width * jnp.dtype(dtype).itemsize
    steps = min(left // (2 * INNER * (held + width)), MOST_STEPS)
    over_columns = 2 if columns // width % 2 == 0 else 1
    return Tile(width, steps, over_columns if rows == held else rows // held)


def swizzled(width: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """How rows of `width` lie in shared memory for the tensor cores."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def stream(
    tile: Tile, shape: tuple[int, int, int], x_ref: Any, matrix_ref: Any,
    store: Callable[..., None], *, transposed: bool = False,
) -> None:  # fmt: skip
    """Inside a kernel: this program's fp32 sums, handed to `store`.

    `shape` is that of all results: parts of the inner axis, rows, columns. The matrix is
    `[K, columns]`, or `transposed` `[columns, K]`. `store(sums, part, place, own, block)` gets the
    `[ROWS, tile.columns]` sums of its warp group, the part, which tile of the columns they are,
    where the group's rows begin among those that the program holds, and where these begin among
    all.
    """
    parts, R, _ = shape
    K, held = x_ref.shape[1], min(R, HELD)
    place, block = lax.axis_index("tile"), lax.axis_index("block")
    # A cluster lies along the columns where one program holds all rows, else along the rows.
    over_rows, member = R // held > 1, lax.axis_index("cluster")
    if over_rows:
        block = block * tile.cluster + member
    else:
        place = place * tile.cluster + member
    share = K // parts
    part = lax.axis_index("part")
    inner = pl.ds(pl.multiple_of(part * share, INNER), share)
    own = lax.axis_index("group") * ROWS

    def multiply(_: Any, x: Any, weights: Any, sums: Any) -> Any:
        rows = x.at[pl.ds(pl.multiple_of(own, ROWS), ROWS)]
        plgpu.wgmma(sums, rows, weights.transpose((1, 0)) if transposed else weights)
        plgpu.wgmma_wait(0)
        return sums

    def compute(run: Callable[..., Any]) -> None:
        def scoped(sums: Any) -> None:
            run(sums)
            store(sums[...], part, place, own, block * held)

        pl.run_scoped(scoped, plgpu.ACC((ROWS, tile.columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]

    once = ("cluster",) if tile.cluster > 1 else ()
    row_spec = plgpu.BlockSpec(
        (held, INNER), lambda k: (0, k), transforms=swizzled(INNER, x_ref.dtype),
        collective_axes=() if over_rows else once, memory_space=plgpu.SMEM,
    )  # fmt: skip
    weights, width = (INNER, tile.columns), tile.columns
    if transposed:
        weights, width = weights[::-1], INNER
    weight_spec = plgpu.BlockSpec(
        weights, (lambda k: (0, k)) if transposed else (lambda k: (k, 0)),
        transforms=swizzled(width, x_ref.dtype),
        collective_axes=once if over_rows else (), memory_space=plgpu.SMEM,
    )  # fmt: skip
    pipeline = plgpu.emit_pipeline_warp_specialized(
        multiply, grid=(share // INNER,), in_specs=[row_spec, weight_spec],
        memory_registers=40, max_concurrent_steps=tile.steps, wg_axis="group",
        num_compute_wgs=held // ROWS, compute_context=compute,
    )  # fmt: skip

    columns = pl.ds(pl.multiple_of(place * tile.columns, INNER), tile.columns)
    weights = matrix_ref.at[columns, inner] if transposed else matrix_ref.at[inner, columns]
    rows = pl.ds(pl.multiple_of(block * held, ROWS), held)
    pipeline(x_ref.at[rows, inner], weights)


def launch(
    program: Callable[..., None], arguments: Sequence[Array], tile: Tile,
    shape: tuple[int, int, int], out_type: Any, scratch: Sequence[Any], *, interpret: bool,
) -> Any:  # fmt: skip
    """Run a `program` that calls `stream` over all of `shape`; it gets the tile first.

    Raises:
        ValueError: parts, tiles or clusters do not come out even: something would not be computed.
    """
    options: dict[str, Any] = {}
    if interpret:
        # In `plgpu` from jax 0.11 on; before, it knows no barriers of a cluster.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        options["interpret"] = InterpretGPUParams()
        if jax.__version_info__ < (0, 11):
            tile = dataclasses.replace(tile, cluster=1)
    parts, R, N = shape
    held, K = min(R, HELD), arguments[0].shape[1]
    tiles, blocks = N // tile.columns, R // held
    joined = blocks if blocks > 1 else tiles
    if R % ROWS or R % held or K % (parts * INNER) or N % tile.columns or joined % tile.cluster:
        raise ValueError(
            f"{R} rows, {N} columns and an inner axis of {K} in {parts} parts do not fill {tile}"
        )
    grid = (tiles, blocks // tile.cluster) if blocks > 1 else (tiles // tile.cluster, 1)
    return plgpu.kernel(
        functools.partial(program, tile), out_type=out_type, scratch_types=scratch,
        grid=(*grid, parts), grid_names=("tile", "block", "part"),
        cluster=(tile.cluster,), cluster_names=("cluster",),
        num_threads=held // ROWS + 1, thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **options,
    )(*arguments)  # fmt: skip


def product_parts(
    x: Float[Array, "R K"],
    matrix: Float[Array, "K N"],
    parts: int,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "S R N"]:
    """fp32 products over each of `parts` shares of the inner axis, which `INNER` must divide."""
    R, N = len(x), matrix.shape[1]
    tile = tile or own_tile(R, N, jnp.float32)
    shape = (parts, R, N)

    def product_parts(tile: Tile, x_ref: Any, matrix_ref: Any, out_ref: Any, out_tile: Any) -> None:
        def store(sums: Array, part: Array, place: Array, own: Array, block: Array) -> None:
            rows = pl.ds(pl.multiple_of(own, ROWS), ROWS)
            out_tile[rows] = sums
            plgpu.commit_smem()
            stored = pl.ds(pl.multiple_of(block + own, ROWS), ROWS)
            columns = pl.ds(pl.multiple_of(place * tile.columns, tile.columns), tile.columns)
            plgpu.copy_smem_to_gmem(out_tile.at[rows], out_ref.at[part, stored, columns])
            plgpu.wait_smem_to_gmem(0)

        stream(tile, shape, x_ref, matrix_ref, store)

    held = (min(R, HELD), tile.columns)
    out_tile = plgpu.SMEM(held, jnp.float32, transforms=swizzled(tile.columns, jnp.float32))
    out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    return launch(
        product_parts, (x, matrix), tile, shape, out_type, [out_tile], interpret=interpret
    )
