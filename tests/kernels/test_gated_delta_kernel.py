"""The Pallas kernel of a gated delta step, interpreted, against the reference."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, gated_delta_step
from pallas_kernels.gated_delta.cases import SMALL, Case
from tests.kernels import quick_jit
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

RESULTS = ("outputs", "state", "updates", "decay")


# Each case in the dtype whose branch of the kernel it strains: bf16 splits a side of every product
# in three parts, fp32 relies on the interpreter's full precision.
BF16 = ("like_keys", "short_block", "one_token")
CASES = {case.name: case for case in SMALL}
RUNS = [(case.name, jnp.float32) for case in SMALL if case.name != "short_block"]
RUNS += [(name, jnp.bfloat16) for name in BF16]


def run(case: Case, dtype, kernels, seed=1):
    step = functools.partial(gated_delta_step, key_heads=case.key_heads, kernels=kernels)
    return quick_jit(step)(*case.arguments(dtype, seed))


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_kernel_equals_reference(name, dtype):
    """Outputs, committed state and records; a row before position 0 and rejected records too."""
    case = CASES[name]
    got, wanted = run(case, dtype, "interpret"), run(case, dtype, "reference")
    for name, mine, theirs in zip(RESULTS, got, wanted, strict=True):
        assert mine.dtype == theirs.dtype, name
        tolerance = LAYER if mine.dtype == jnp.float32 else KERNEL_BF16
        assert_close(mine.astype(jnp.float32), theirs.astype(jnp.float32), tolerance, name)


def test_rejected_records_may_be_anything():
    """What stands behind the pending tokens is not read, be it NaN."""
    case = SMALL[0]
    arguments = list(case.arguments(jnp.float32, 2))
    step = functools.partial(gated_delta_step, key_heads=case.key_heads, kernels="interpret")
    clean = quick_jit(step)(*arguments)
    behind = np.arange(case.T) >= np.asarray(case.pending)[:, None]
    for place in (7, 8):
        array = np.array(arguments[place])
        array.swapaxes(1, 2)[behind] = np.nan
        arguments[place] = jnp.asarray(array)
    for name, mine, theirs in zip(RESULTS, quick_jit(step)(*arguments), clean, strict=True):
        np.testing.assert_array_equal(mine, theirs, name)


def test_an_unsupported_width_is_named():
    case = Case(name="odd", lengths=(4,), pending=(0,), vd=24)
    with pytest.raises(KernelError, match="value width 24"):
        run(case, jnp.float32, "interpret")
