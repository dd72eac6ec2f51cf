"""Products of 64 to 512 rows (Mosaic GPU), interpreted, and who takes them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.residual import add_product
from pallas_kernels import choose, hopper
from pallas_kernels.parts import number_of_parts, product_parts
from tests.kernels import quick_jit
from tests.tolerances import LAYER, assert_close


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "width_in", "parts", "columns", "tile"),
    [
        (64, 256, 1, 128, None),
        (128, 512, 4, 64, None),
        # More steps than copies under way, and fewer.
        (64, 448, 1, 128, hopper.Tile(columns=64, steps=3, cluster=2)),
        (128, 256, 2, 128, hopper.Tile(columns=64, steps=8, cluster=1)),
        # Several blocks of rows: all in a cluster, two in each, each alone.
        (512, 128, 1, 128, None),
        (512, 64, 1, 64, hopper.Tile(columns=64, steps=2, cluster=2)),
        (256, 128, 2, 64, hopper.Tile(columns=64, steps=2, cluster=1)),
    ],
)
def test_sums_of_every_part(rows, width_in, parts, columns, tile):
    x, matrix = normal(0, rows, width_in), normal(1, width_in, columns)
    run = functools.partial(hopper.product_parts, parts=parts, tile=tile, interpret=True)
    got = np.asarray(quick_jit(run)(x, matrix))
    exact_x = np.asarray(x, np.float64).reshape(rows, parts, -1)
    exact = np.asarray(matrix, np.float64).reshape(parts, width_in // parts, columns)
    assert got.shape == (parts, rows, columns)
    assert_close(got, np.einsum("rpk,pkn->prn", exact_x, exact), LAYER)


def test_parts_of_a_product_by_the_kernel_are_those_of_xla():
    x, matrix = normal(2, 128, 512), normal(3, 512, 128)
    got = quick_jit(product_parts, static_argnums=(2, 3))(x, matrix, 4, "interpret")
    assert_close(got, product_parts(x, matrix, 4), LAYER)


@pytest.mark.parametrize(
    ("rows", "width_in", "columns", "dtype", "taken"),
    [
        (128, 2560, 9216, "bfloat16", True),
        (96, 256, 128, "bfloat16", False),
        (256, 256, 128, "bfloat16", False),
        (128, 96, 128, "bfloat16", False),
        (128, 128, 96, "bfloat16", False),
        (128, 128, 128, "float32", False),
    ],
)
def test_what_it_takes(rows, width_in, columns, dtype, taken):
    assert hopper.takes(rows, width_in, columns, dtype) == taken
    assert hopper.is_streamed(rows, width_in, columns, dtype, "interpret") == taken
    # It takes 64 rows too, but XLA is as fast.
    assert not hopper.is_streamed(64, width_in, columns, dtype, "interpret")


def test_another_generation_of_gpus_does_without(monkeypatch):
    monkeypatch.setattr(hopper, "compute_capability", lambda: "9.0")
    assert hopper.takes(64, 256, 128, "bfloat16")
    for other in ("8.0", "10.0"):
        monkeypatch.setattr(hopper, "compute_capability", lambda other=other: other)
        assert not hopper.takes(64, 256, 128, "bfloat16")


@pytest.mark.parametrize(
    ("rows", "width_in", "columns", "parts", "tile"),
    [
        (64, 192, 128, 2, None),
        (64, 128, 192, 1, hopper.Tile(columns=128, steps=2, cluster=1)),
        (64, 128, 192, 1, hopper.Tile(columns=64, steps=2, cluster=2)),
        (192, 128, 128, 1, hopper.Tile(columns=64, steps=2, cluster=1)),
    ],
)
def test_nothing_is_left_out_silently(rows, width_in, columns, parts, tile, monkeypatch):
    x, matrix = normal(0, rows, width_in), normal(1, width_in, columns)
    # As on a card: one interpreter leaves clusters out.
    monkeypatch.setattr(hopper.plgpu, "kernel", None)
    with pytest.raises(
        ValueError, match=f"{rows} rows, {columns} columns .* {width_in} in {parts}"
    ):
        hopper.product_parts(x, matrix, parts, tile=tile)


def test_layers_reach_the_kernel(monkeypatch):
    """A width or dtype that it does not take goes elsewhere."""
    made = []

    def record(x, matrix, parts, **options):
        made.append((matrix.shape, parts))
        return streamed(x, matrix, parts, **options)

    streamed = hopper.product_parts
    monkeypatch.setattr(hopper, "product_parts", record)
    for width, dtype in ((512, "bfloat16"), (512, "float32"), (528, "bfloat16")):
        layer = SwiGLU(128, width, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        x = normal(4, 8, 16, 128).astype(dtype)
        add_product(x, layer.down_proj, layer.inner(x), None, kernels="interpret")
    assert made == [((512, 128), 2)]


def test_parts_fill_processors_once(monkeypatch):
    """128 columns a program: twenty of them for 2,560."""
    assert hopper.number_of_parts(10240, 2560) == 4
    assert hopper.number_of_parts(9216, 2560) == 4
    assert hopper.number_of_parts(512, 2560) == 2
    assert hopper.number_of_parts(256, 2560) == 1
    assert hopper.number_of_parts(2560, 20480) == 1
    assert number_of_parts(128, 10240, 2560, "bfloat16", "interpret") == 4
    assert number_of_parts(128, 10240, 2560, "float32", "interpret") == 8
    assert number_of_parts(128, 10240, 2560, "bfloat16", "reference") == 8
    monkeypatch.setattr(choose, "platform", lambda: "gpu")
    monkeypatch.setattr(hopper, "compute_capability", lambda: "9.0")
    assert hopper.is_streamed(128, 10240, 2560, "bfloat16", "auto")
    assert not hopper.is_streamed(128, 10240, 2560, "bfloat16", "reference")


@pytest.mark.parametrize("rows", [64, 128, 512])
@pytest.mark.parametrize(
    ("columns", "dtype"), [(9216, "bfloat16"), (2560, "float32"), (192, "float32")]
)
def test_shared_memory_holds_copies_and_results(rows, columns, dtype):
    tile = hopper.own_tile(rows, columns, dtype)
    held = min(rows, 128)
    copies = tile.steps * 2 * hopper.INNER * (held + tile.columns)
    assert tile.steps >= 3
    assert copies + held * tile.columns * jnp.dtype(dtype).itemsize <= hopper.SHARED_BYTES
    # Three tiles of 64 columns have no even cluster.
    assert tile.cluster == ((2 if columns > 192 else 1) if rows <= 128 else rows // 128)
    if rows <= 128:
        assert columns % (tile.columns * tile.cluster) == 0
