"""Parts of a product, residual and norms: the Pallas kernel, interpreted, and its reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.norm import GemmaRMSNorm, RMSNorm, ZeroCentredRMSNorm
from mmflash_jax.layers.residual import add_product
from pallas_kernels import KernelError, residual_norm
from pallas_kernels import parts as parts_rule
from pallas_kernels.parts import product_parts
from pallas_kernels.residual_norm.cases import SMALL
from tests.kernels import quick_jit
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

CASES = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def both(case, dtype):
    """Stream and norm by kernel and by reference."""
    arguments, options = case.arguments(dtype, seed=len(case.name))
    run = quick_jit(functools.partial(residual_norm, kernels="interpret"))
    got, wanted = run(*arguments, **options), residual_norm(*arguments, **options)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype == jnp.dtype(dtype)
    return got, wanted


@CASES
def test_kernel_equals_reference_in_fp32(case):
    got, wanted = both(case, jnp.float32)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, LAYER / 10)


@CASES
def test_kernel_rounds_where_the_reference_does(case):
    """Without a norm before the sum the stream has the reference's bits; squares are summed in
    another order, which may move a normed value to the next one of bf16."""
    got, wanted = (
        [np.asarray(one, np.float32) for one in made] for made in both(case, jnp.bfloat16)
    )
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, KERNEL_BF16)
        assert (one != other).mean() < 0.02
    if case.post is None:
        np.testing.assert_array_equal(got[0], wanted[0])


def randomised(module, seed):
    """The module with a random weight."""
    noise = np.random.default_rng(seed).normal(size=module.weight.shape)
    module.weight[...] = module.weight[...] + jnp.asarray(0.3 * noise, module.weight.dtype)
    return module


@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
@pytest.mark.parametrize("made", [RMSNorm, ZeroCentredRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("bias", [False, True])
def test_add_product_is_layer_after_layer(made, rows, bias, monkeypatch):
    """Reference to the bit; the kernel within rounding, over several parts of the product."""
    monkeypatch.setattr(parts_rule, "LEAST_PART", 16)
    dtype, rng = jnp.dtype("bfloat16"), np.random.default_rng(1)
    projection = linear(128, 32, dtype=dtype, rngs=nnx.Rngs(0), bias=bias)
    if projection.bias is not None:
        projection.bias[...] = jnp.asarray(rng.normal(size=32), dtype)
    norm = randomised(made(32, eps=1e-6, dtype=dtype), 2)
    post = randomised(GemmaRMSNorm(32, eps=1e-6, dtype=dtype), 3)
    x, inputs = (jnp.asarray(rng.normal(size=(*rows, width)), dtype) for width in (32, 128))
    factor = jnp.asarray([0.7], dtype)
    stream = (x + post(projection(inputs))) * factor
    for kernels in ("reference", "interpret"):
        got = add_product(x, projection, inputs, norm, post=post, factor=factor, kernels=kernels)
        for one, wanted in zip(got, (stream, norm(stream)), strict=True):
            one, wanted = np.asarray(one, np.float32), np.asarray(wanted, np.float32)
            if kernels == "reference":
                np.testing.assert_array_equal(one, wanted)
            assert_close(one, wanted, KERNEL_BF16)


def test_parts_sum_to_the_product():
    matrix = linear(64, 16, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)).kernel[...]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    parts = product_parts(x, matrix, 4)
    assert parts.shape == (4, 3, 16)
    assert_close(parts[1], x[:, 16:32] @ matrix[16:32], LAYER)
    assert_close(parts.sum(0), x @ matrix, LAYER)


@pytest.mark.parametrize(
    ("rows", "width_in", "wanted"),
    [(1, 4096, 8), (128, 9216, 8), (129, 10240, 4), (512, 4096, 2), (1000, 4096, 1), (16, 256, 1)],
)  # fmt: skip
def test_splits_give_processors_two_or_three_tiles(rows, width_in, wanted):
    assert parts_rule.number_of_parts(rows, width_in, 2560) == wanted


def test_a_width_that_no_kernel_takes_is_named():
    arguments, options = SMALL[0].arguments(jnp.float32, 0)
    x, parts, _ = arguments
    with pytest.raises(KernelError, match="width 40"):
        residual_norm(x[:, :40], parts[..., :40], None, kernels="interpret", **options)
    with pytest.raises(KernelError, match="cpu"):
        residual_norm(*arguments, **options, kernels="gpu")
    jax.tree.map(
        np.testing.assert_array_equal,
        residual_norm(*arguments, **options, kernels="auto"),
        residual_norm(*arguments, **options),
    )
