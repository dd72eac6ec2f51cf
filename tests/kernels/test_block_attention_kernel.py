"""The Pallas kernel of block attention, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, block_attention
from pallas_kernels.block_attention import gpu_tile
from pallas_kernels.block_attention.cases import SMALL, Case
from tests.kernels import quick_jit
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

# Every branch of the masks with the kernel's own sizes, four splits of the context here.
OWN = [(case.name, None) for case in SMALL]
# One split writes its result at once, without a merge; blocks longer than a tile loop over it.
ONE = gpu_tile.Tile(rows=16, keys=16, splits=1, warps=4, stages=1)
# More splits than tiles of context, so some are empty; query rows that are no tokens.
MANY = gpu_tile.Tile(rows=32, keys=16, splits=8, warps=4, stages=1)
TILED = [(name, ONE) for name in ("draft", "chunk_ring")]
TILED += [(name, MANY) for name in ("one_token", "documents", "chunk_window")]
CASES = {case.name: case for case in SMALL}


def both(case: Case, dtype, tile=None, seed=0):
    """Kernel over a cache whose unused slots are NaN, and reference over one where they are 0."""
    run = functools.partial(case.kernel, tile=tile, interpret=True)
    got = quick_jit(run)(*case.arguments(dtype, seed, np.nan))
    reference = functools.partial(block_attention, **case.options)
    wanted = quick_jit(reference)(*case.arguments(dtype, seed, 0.0))
    assert got.dtype == wanted.dtype
    return np.asarray(got, np.float32), np.asarray(wanted, np.float32)


@pytest.mark.parametrize(("name", "tile"), OWN + TILED)
def test_kernel_equals_reference_in_fp32(name, tile):
    got, wanted = both(CASES[name], jnp.float32, tile, seed=len(name))
    assert_close(got, wanted, LAYER)


@pytest.mark.parametrize("name", ["verify", "one_token"])
def test_kernel_equals_reference_in_bf16(name):
    """Larger tiles, and weights of the softmax rounded before their product with values."""
    got, wanted = both(CASES[name], jnp.bfloat16)
    assert_close(got, wanted, KERNEL_BF16)


def test_the_public_function_reaches_the_kernel_and_never_swaps_a_named_choice():
    case = CASES["verify"]
    arguments = case.arguments(jnp.float32, 3, 0.0)
    run = quick_jit(functools.partial(block_attention, **case.options), static_argnames="kernels")
    reference = run(*arguments, kernels="reference")
    interpreted = run(*arguments, kernels="interpret")
    assert_close(interpreted, reference, LAYER)
    assert (interpreted != reference).any(), "the kernel sums in another order"
    np.testing.assert_array_equal(run(*arguments, kernels="auto"), reference)
    with pytest.raises(KernelError, match="cpu"):
        run(*arguments, kernels="gpu")


def test_an_unsupported_head_width_is_named():
    case = Case(name="narrow", lengths=(4,), H=24)
    with pytest.raises(KernelError, match="24"):
        block_attention(*case.arguments(jnp.float32, 0, 0.0), **case.options, kernels="interpret")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, jnp.float32)
        for name in ("draft", "anchors", "group_of_3", "window_both_ways", "verify")
    ]
    + [("anchors", jnp.bfloat16)],
)
def test_gradients_are_those_of_the_reference(name, dtype):
    """Of queries, contexts and own sides; slots that no block reads get none."""
    case = CASES[name]
    arguments = case.arguments(dtype, 5, 0.0)
    # What no block reads may be anything; the reference would let NaN through.
    unused = case.arguments(dtype, 5, np.nan)
    weights = np.random.default_rng(6).standard_normal(arguments[0].shape, np.float32)

    def loss(kernels, q, k_cache, v_cache, k, v):
        out = block_attention(
            q, k_cache, v_cache, k, v, arguments[-1], **case.options, kernels=kernels
        )
        return (out.astype(jnp.float32) * weights).sum()

    def gradient(kernels, given):
        made = quick_jit(jax.grad(functools.partial(loss, kernels), argnums=range(5)))
        return made(*given[:-1])

    pairs = zip(gradient("interpret", unused), gradient("reference", arguments), strict=True)
    for got, wanted in pairs:
        assert got.dtype == wanted.dtype
        assert float(jnp.abs(wanted.astype(jnp.float32)).max()) > 0.01
        tolerance = LAYER if dtype == jnp.float32 else KERNEL_BF16
        assert_close(got.astype(jnp.float32), wanted.astype(jnp.float32), tolerance)


@pytest.mark.parametrize(("name", "why"), [("ring", "ring"), ("chunk", "140 query rows")])
def test_what_has_no_gradient_says_so(name, why):
    case = CASES[name]
    *given, length = case.arguments(jnp.float32, 0, 0.0)
    run = functools.partial(block_attention, length=length, **case.options, kernels="interpret")
    with pytest.raises(KernelError, match=why):
        jax.grad(lambda *given: run(*given).sum())(*given)


@pytest.mark.parametrize(
    ("shape", "slots", "window", "wanted"),
    [
        # Rows, keys, splits, warps, stages; queries [R, T, N, H] over two key heads.
        ((1, 1, 8, 512), 1600, None, gpu_tile.Tile(16, 32, 32, 4, 2)),
        ((1, 1, 8, 256), 513, 512, gpu_tile.Tile(16, 64, 16, 4, 2)),
        ((1, 16, 8, 256), 528, 512, gpu_tile.Tile(16, 64, 16, 4, 2)),
        ((8, 16, 8, 256), 528, 512, gpu_tile.Tile(64, 32, 8, 4, 3)),
        ((32, 16, 8, 256), 528, 512, gpu_tile.Tile(64, 32, 2, 4, 3)),
        ((8, 16, 16, 256), 1600, None, gpu_tile.Tile(64, 64, 4, 4, 2)),
        ((1, 16, 8, 512), 1600, None, gpu_tile.Tile(64, 32, 32, 8, 2)),
    ],
)
def test_tiles_follow_the_work_there_is(shape, slots, window, wanted):
    q = jnp.zeros(shape, jnp.bfloat16)
    cache = jnp.zeros((shape[0], 2, slots, shape[-1]), jnp.bfloat16)
    assert gpu_tile.own_tile(q, cache, window) == wanted


def test_blocks_that_contexts_do_not_divide_are_counted():
    q, k_cache, v_cache, k, v, length = CASES["anchors"].arguments(jnp.float32, 0, 0.0)
    with pytest.raises(ValueError, match=r"5 blocks .* 2 contexts"):
        block_attention(q[:5], k_cache, v_cache, k[:5], v[:5], length[:5], scale=1.0, causal=True)
