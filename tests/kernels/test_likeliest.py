"""The most likely tokens: the Pallas kernels, interpreted, and their reference.

The one for Hopper is interpreted from jax 0.11 on (`make compiled`).
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, choose, likeliest
from pallas_kernels.likeliest import gpu, pays
from pallas_kernels.likeliest.cases import SMALL
from tests.kernels import quick_jit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_kernel_equals_reference(case, dtype):
    x, table = case.arguments(dtype, seed=len(case.name))
    run = functools.partial(likeliest, vocabulary=case.vocabulary)
    got = np.asarray(quick_jit(functools.partial(run, kernels="interpret"))(x, table))
    wanted = np.asarray(run(x, table))
    assert got.dtype == np.int32
    exact = np.asarray(x, np.float64) @ np.asarray(table, np.float64).T
    exact = exact[:, : case.vocabulary]
    np.testing.assert_array_equal(wanted, exact.argmax(-1))
    np.testing.assert_array_equal(got, wanted)
    if case.twice:
        assert (got < case.tokens // 2).all()
    if case.vocabulary is not None:
        assert not (np.asarray(run(x, table, vocabulary=None)) == got).all()


# The interpreter of Mosaic GPU multiplies with numpy.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("kernels", ["reference", "interpret"])
@pytest.mark.parametrize(("name", "dtype"), [("padded_table", "float32"), ("streamed", "bfloat16")])
def test_an_id_is_of_the_table_whatever_the_products_are(kernels, name, dtype):
    (case,) = [case for case in SMALL if case.name == name]
    x, table = case.arguments(dtype, 0)
    for bad, width in ((np.nan, case.width), (np.nan, 1), (np.inf, case.width), (-np.inf, 1)):
        rows = x.at[1, :width].set(bad)
        run = functools.partial(likeliest, vocabulary=case.vocabulary, kernels=kernels)
        got, good = (np.asarray(quick_jit(run)(given, table)) for given in (rows, x))
        assert 0 <= got[1] < case.vocabulary
        np.testing.assert_array_equal(np.delete(got, 1), np.delete(good, 1))


def test_how_many_rows_are_worth_the_kernel(monkeypatch):
    table = jnp.zeros((256, 64), jnp.bfloat16)
    monkeypatch.setattr(choose, "platform", lambda: "gpu")
    for capability, most in (("9.0", 512), ("8.0", 128)):
        monkeypatch.setattr(
            "pallas_kernels.hopper.compute_capability", lambda capability=capability: capability
        )
        worth = [rows for rows in (32, 33, 128, 129, 512, 513) if pays(rows, table, "gpu")]
        assert worth == [rows for rows in (33, 128, 129, 512) if rows <= most]
        # In fp32, and where tiles do not come out even, up to what the other kernel takes.
        for other in (table.astype(jnp.float32), table[:200]):
            assert [pays(rows, other, "gpu") for rows in (32, 33, 128, 129)] == [0, 1, 1, 0]
    assert not pays(64, table, "reference")
    assert pays(64, table, "auto")
    assert not pays(64, table.astype(jnp.float32), "auto")


def test_batch_axes_stay():
    x, table = SMALL[0].arguments("float32", 0)
    wanted = likeliest(x, table)
    got = likeliest(x.reshape(2, 8, -1), table, kernels="auto")
    np.testing.assert_array_equal(got, wanted.reshape(2, 8))


def test_tables_that_no_kernel_takes_are_named():
    assert "numbers" in str(gpu.obstacle(2**20, 2**11))
    assert gpu.obstacle(262_144, 2560) is None
    with pytest.raises(KernelError, match="width 24 is no multiple of 16"):
        likeliest(jnp.ones((2, 24)), jnp.ones((64, 24)), kernels="interpret")
