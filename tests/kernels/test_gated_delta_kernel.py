"""The Pallas kernel of a gated delta step, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, gated_delta_step
from pallas_kernels.gated_delta.cases import SMALL, Case
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

RESULTS = ("outputs", "state", "updates", "decay")


def run(case: Case, dtype, kernels, seed=1):
    step = functools.partial(gated_delta_step, key_heads=case.key_heads, kernels=kernels)
    return jax.jit(step)(*case.arguments(dtype, seed))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
def test_kernel_equals_reference(case, dtype):
    """Outputs, committed state and records; a row before position 0 and rejected records too."""
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
    clean = jax.jit(step)(*arguments)
    behind = np.arange(case.T) >= np.asarray(case.pending)[:, None]
    for place in (7, 8):
        array = np.array(arguments[place])
        array.swapaxes(1, 2)[behind] = np.nan
        arguments[place] = jnp.asarray(array)
    for name, mine, theirs in zip(RESULTS, jax.jit(step)(*arguments), clean, strict=True):
        np.testing.assert_array_equal(mine, theirs, name)


def test_an_unsupported_width_is_named():
    case = Case(name="odd", lengths=(4,), pending=(0,), vd=24)
    with pytest.raises(KernelError, match="value width 24"):
        run(case, jnp.float32, "interpret")
