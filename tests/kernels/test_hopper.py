"""Products of 64 to 512 rows (Mosaic GPU), interpreted, and who takes them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choose, hopper
from pallas_kernels.gated_product import pays
from pallas_kernels.parts import is_streamed, number_of_parts, product_parts
from tests.kernels import quick_jit
from tests.tolerances import LAYER, assert_close


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize("rows", [64, 128, 512])
@pytest.mark.parametrize(
    ("width_in", "sides", "parts", "columns", "tile"),
    [
        (256, 1, 1, 128, None),
        (512, 1, 4, 64, None),
        (256, 2, 1, 256, None),
        # More steps than copies under way, and fewer.
        (448, 2, 1, 128, hopper.Tile(columns=64, steps=3, cluster=2)),
        (256, 3, 2, 128, hopper.Tile(columns=64, steps=8, cluster=1)),
    ],
)
def test_sums_of_every_side_and_part(rows, width_in, sides, parts, columns, tile):
    x, matrix = normal(0, rows, width_in), normal(1, width_in, sides * columns)

    def joined(*sums):
        return functools.reduce(jnp.add, [(1 + place) * one for place, one in enumerate(sums)])

    def run(x, matrix):
        return hopper.streamed_product(
            x, matrix, joined, sides=sides, parts=parts, dtype=jnp.float32, tile=tile,
            interpret=True,
        )  # fmt: skip

    got = np.asarray(quick_jit(run)(x, matrix))
    exact_x = np.asarray(x, np.float64).reshape(rows, parts, -1)
    exact = np.asarray(matrix, np.float64).reshape(parts, width_in // parts, sides, columns)
    weighted = np.einsum("rpk,pksn,s->prn", exact_x, exact, 1 + np.arange(sides))
    assert got.shape == (parts, rows, columns)
    assert_close(got, weighted, LAYER)


def test_parts_of_a_product_by_the_kernel_are_those_of_xla():
    x, matrix = normal(2, 64, 512), normal(3, 512, 128)
    got = quick_jit(product_parts, static_argnums=(2, 3))(x, matrix, 4, "interpret")
    assert_close(got, product_parts(x, matrix, 4), LAYER)


@pytest.mark.parametrize(
    ("rows", "width_in", "columns", "dtype", "why"),
    [
        (96, 256, 128, "bfloat16", "96 rows are not 64 or 128"),
        (192, 256, 128, "bfloat16", "192 rows are not"),
        (64, 96, 128, "bfloat16", "inner width 96 is no multiple of 64"),
        (64, 128, 96, "bfloat16", "outer width 96 is no multiple of 64"),
        (64, 128, 128, "float32", "float32 has not 16 bits"),
        (128, 2560, 9216, "bfloat16", None),
    ],
)
def test_what_it_cannot_take(rows, width_in, columns, dtype, why):
    said = hopper.obstacle(rows, width_in, columns, dtype)
    assert said == why if why is None else why in str(said)


def test_another_generation_of_gpus_does_without(monkeypatch):
    assert hopper.fits(64)
    monkeypatch.setattr(hopper, "compute_capability", lambda: "9.0")
    assert hopper.fits(64)
    assert pays(128)
    for other in ("8.0", "10.0"):
        monkeypatch.setattr(hopper, "compute_capability", lambda other=other: other)
        assert "no Hopper GPU" in str(hopper.obstacle(64, 256, 128, "bfloat16"))
        assert not pays(128)


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
    # Until a card has seen it.
    assert not is_streamed(128, 10240, 2560, "bfloat16", "auto")
    assert is_streamed(128, 10240, 2560, "bfloat16", "gpu")


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(
    ("columns", "sides", "dtype"), [(9216, 2, "bfloat16"), (2560, 1, "float32")]
)
def test_shared_memory_holds_copies_and_results(rows, columns, sides, dtype):
    tile = hopper.own_tile(rows, columns, sides, dtype)
    held = min(rows, 128)
    copies = tile.steps * 2 * hopper.INNER * (held + sides * tile.columns)
    assert tile.steps >= 3
    assert copies + held * tile.columns * jnp.dtype(dtype).itemsize <= hopper.SHARED_BYTES
    assert tile.cluster == (2 if rows <= 128 else rows // 128)
    assert columns % (tile.columns * tile.cluster) == 0
