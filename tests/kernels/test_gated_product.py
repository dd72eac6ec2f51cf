"""Both products of a gated feed-forward layer: the Pallas kernel, interpreted; its reference."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from mmflash_jax.layers.mlp import GeGLU, SwiGLU
from pallas_kernels import KernelError, gated_product
from pallas_kernels.gated_product.cases import SMALL
from tests.kernels import quick_jit
from tests.tolerances import KERNEL_BF16, LAYER, assert_close


def both(case, dtype):
    *arrays, activation = case.arguments(dtype, seed=len(case.name))
    run = functools.partial(gated_product, activation=activation)
    kernel = quick_jit(functools.partial(run, kernels="interpret"))
    got, wanted = kernel(*arrays), run(*arrays)
    assert got.dtype == wanted.dtype == jnp.dtype(dtype)
    assert got.shape == wanted.shape == (case.rows, case.columns)
    return got, wanted


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_kernel_equals_reference(case):
    assert_close(*both(case, jnp.float32), LAYER / 10)
    got, wanted = (np.asarray(one, np.float32) for one in both(case, jnp.bfloat16))
    # Products are summed in another order, which may move one to the next value of bf16.
    assert_close(got, wanted, KERNEL_BF16)
    assert (got != wanted).mean() < 0.02


@pytest.mark.parametrize(
    ("layer", "theirs"),
    [
        (SwiGLU, torch.nn.functional.silu),
        (GeGLU, functools.partial(torch.nn.functional.gelu, approximate="tanh")),
    ],
)
def test_layers_round_as_torch_does(layer, theirs):
    """In bf16, by the reference and by the kernel."""
    ours = layer(32, 48, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(0.3 * rng.normal(size=(32, 96)), jnp.bfloat16)
    ours.gate_up_proj.kernel[...] = matrix
    x = jnp.asarray(rng.normal(size=(2, 3, 32)), jnp.bfloat16)

    def to_torch(array):
        return torch.tensor(np.asarray(array, np.float32)).bfloat16()

    gate, up = (to_torch(x) @ to_torch(matrix)).split(48, dim=-1)
    wanted = (theirs(gate) * up).float().numpy()
    for kernels in ("reference", "interpret"):
        got = np.asarray(ours.inner(x, kernels), np.float32)
        assert_close(got, wanted, KERNEL_BF16)
        assert (got != wanted).mean() < 0.02


def test_a_layer_takes_the_kernel_for_few_rows(monkeypatch):
    """Neither for one or two, where XLA is faster, nor for many that fill no tensor core."""
    asked = []

    def record(x, matrix, activation, *, kernels):
        asked.append(kernels)
        return gated_product(x, matrix, activation)

    monkeypatch.setattr("mmflash_jax.layers.mlp.gated_product", record)
    layer = SwiGLU(64, 128, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    for rows in ((1, 1), (2, 1), (1, 3), (2, 16), (3, 11), (4, 16), (1, 65), (4, 128), (8, 128)):
        layer.inner(jnp.ones((*rows, 64), jnp.bfloat16), "interpret")
    worth = [False, False, True, True, False, True, False, True, False]
    assert asked == ["interpret" if one else "reference" for one in worth]
    # In fp32, and where the width fills no tensor core, XLA makes many rows.
    for width, dtype in ((128, "float32"), (96, "bfloat16")):
        other = SwiGLU(64, width, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        other.inner(jnp.ones((64, 64), dtype), "interpret")
        assert asked.pop() == "reference"


def test_widths_that_no_kernel_takes_are_named():
    x, matrix = jnp.ones((4, 24)), jnp.ones((24, 64))
    with pytest.raises(KernelError, match="inner width 24 is no multiple of 16"):
        gated_product(x, matrix, "silu", kernels="interpret")
    with pytest.raises(KernelError, match="outer width 24 is no multiple of 16"):
        gated_product(jnp.ones((4, 32)), jnp.ones((32, 48)), "silu", kernels="interpret")
    assert gated_product(x, matrix, "silu", kernels="auto").shape == (4, 32)
