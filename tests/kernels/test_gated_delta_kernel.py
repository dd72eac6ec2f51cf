"""The Pallas kernel of a gated delta step, interpreted, against the reference."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, gated_delta_step
from pallas_kernels.gated_delta import gpu
from pallas_kernels.gated_delta.cases import SMALL, Case
from tests.kernels import quick_jit
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

RESULTS = ("outputs", "state", "updates", "decay", "ring")


# Each case in the dtype whose branch of the kernel it strains: bf16 splits a side of every product
# in three parts, fp32 relies on the interpreter's full precision.
BF16 = ("like_keys", "short_block", "one_token", "narrow")
CASES = {case.name: case for case in SMALL}
RUNS = [(case.name, jnp.float32) for case in SMALL if case.name != "short_block"]
RUNS += [(name, jnp.bfloat16) for name in BF16]


def run(case: Case, dtype, kernels, unused=1e6, seed=1):
    step = functools.partial(gated_delta_step, key_heads=case.key_heads, kernels=kernels)
    return quick_jit(step)(*case.arguments(dtype, seed, unused))


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_kernel_equals_reference(name, dtype):
    """Outputs, committed state, records and ring. Rejected records and slots of the ring that hold
    nothing are NaN: not read, and of the latter only those of real new tokens written."""
    case = CASES[name]
    got = dict(zip(RESULTS, run(case, dtype, "interpret", np.nan), strict=True))
    wanted = dict(zip(RESULTS, run(case, dtype, "reference"), strict=True))
    for name, theirs in wanted.items():
        mine = got[name]
        assert mine.dtype == theirs.dtype, name
        if name == "ring":
            untouched = np.asarray(theirs == jnp.asarray(1e6, dtype))
            np.testing.assert_array_equal(np.isnan(np.asarray(mine, np.float32)), untouched)
            mine, theirs = (np.asarray(x, np.float32)[~untouched] for x in (mine, theirs))
            np.testing.assert_array_equal(mine, theirs)
            continue
        tolerance = LAYER if mine.dtype == jnp.float32 else KERNEL_BF16
        assert_close(mine.astype(jnp.float32), theirs.astype(jnp.float32), tolerance, name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_may_take_a_state_in_parts(dtype):
    case = dataclasses.replace(CASES["one_token"], vd=32)
    arguments = case.arguments(dtype, 4, 0.0)
    step = functools.partial(
        gpu.gated_delta_step, key_heads=case.key_heads, interpret=True, token_tile=(16, 1)
    )
    wanted = quick_jit(functools.partial(gated_delta_step, key_heads=case.key_heads))(*arguments)
    for name, got, theirs in zip(RESULTS, quick_jit(step)(*arguments), wanted, strict=True):
        tolerance = LAYER if got.dtype == jnp.float32 else KERNEL_BF16
        assert_close(got.astype(jnp.float32), theirs.astype(jnp.float32), tolerance, name)


@pytest.mark.parametrize("columns", [16, 32])
def test_a_state_may_be_cut_anywhere(columns):
    """Programs for some columns of a state give what those for all of them give."""
    case = CASES["narrow"]
    arguments = case.arguments(jnp.float32, 3)
    tile = gpu.Tile(columns=columns, keys=16, warps=1, prepare_warps=1)
    step = functools.partial(
        gpu.gated_delta_step, key_heads=case.key_heads, interpret=True, tile=tile
    )
    wanted = quick_jit(functools.partial(gated_delta_step, key_heads=case.key_heads))(*arguments)
    for name, mine, theirs in zip(RESULTS, quick_jit(step)(*arguments), wanted, strict=True):
        assert_close(mine, theirs, LAYER, name)


def test_an_unsupported_width_is_named():
    case = Case(name="odd", lengths=(4,), pending=(0,), vd=24)
    with pytest.raises(KernelError, match="value width 24"):
        run(case, jnp.float32, "interpret")


def test_a_block_wider_than_its_records_is_named():
    case = Case(name="wide", lengths=(4,), pending=(0,), T=2, tokens=3)
    with pytest.raises(ValueError, match=r"3 tokens.*records of 2"):
        run(case, jnp.float32, "reference")
