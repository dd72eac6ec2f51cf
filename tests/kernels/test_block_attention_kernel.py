"""The Pallas kernel of block attention, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, block_attention
from pallas_kernels.block_attention import gpu
from pallas_kernels.block_attention.cases import SMALL, Case
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

TILES = {
    "own choice": None,
    "one program": gpu.Tile(rows=16, keys=16, splits=1, warps=4, stages=1),
    "many splits": gpu.Tile(rows=32, keys=16, splits=8, warps=4, stages=1),
}


def both(case: Case, dtype, tile=None, seed=0):
    """Kernel over a cache whose unused slots are NaN, and reference over one where they are 0."""
    run = functools.partial(gpu.block_attention, **case.options, tile=tile, interpret=True)
    got = jax.jit(run)(*case.arguments(dtype, seed, np.nan))
    wanted = jax.jit(functools.partial(block_attention, **case.options))(
        *case.arguments(dtype, seed, 0.0)
    )
    assert got.dtype == wanted.dtype
    return np.asarray(got, np.float32), np.asarray(wanted, np.float32)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_kernel_equals_reference_in_fp32(case, tile):
    got, wanted = both(case, jnp.float32, tile, seed=len(case.name))
    assert_close(got, wanted, LAYER)


@pytest.mark.parametrize("case", SMALL[:3], ids=lambda case: case.name)
def test_kernel_equals_reference_in_bf16(case):
    got, wanted = both(case, jnp.bfloat16)
    assert_close(got, wanted, KERNEL_BF16)


def test_the_public_function_reaches_the_kernel_and_never_swaps_a_named_choice():
    case = SMALL[1]
    arguments = case.arguments(jnp.float32, 3, 0.0)
    run = functools.partial(block_attention, *arguments, **case.options)
    assert_close(run(kernels="interpret"), run(), LAYER)
    np.testing.assert_array_equal(run(kernels="auto"), run())
    with pytest.raises(KernelError, match="cpu"):
        run(kernels="gpu")


def test_an_unsupported_head_width_is_named():
    case = Case(name="narrow", lengths=(4,), H=24)
    with pytest.raises(KernelError, match="24"):
        block_attention(*case.arguments(jnp.float32, 0, 0.0), **case.options, kernels="interpret")
