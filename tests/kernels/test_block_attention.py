"""Block attention against a dense softmax in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_attention, write_rows
from pallas_kernels.block_attention import gpu_tile
from tests.tolerances import LAYER, assert_close

LENGTHS = np.array([0, 1, 13, 24])
SLOTS, BLOCK, WIDTH = 24, 6, 8


def inputs(heads, kv_heads, seed=0):
    """q, k_cache, v_cache, k_block, v_block; cache slots at or past a row's length are junk."""
    rng = np.random.default_rng(seed)
    B = len(LENGTHS)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q = normal(B, BLOCK, heads, WIDTH)
    k_cache, v_cache = normal(B, kv_heads, SLOTS, WIDTH), normal(B, kv_heads, SLOTS, WIDTH)
    k_block, v_block = normal(B, BLOCK, kv_heads, WIDTH), normal(B, BLOCK, kv_heads, WIDTH)
    unused = np.arange(SLOTS) >= LENGTHS[:, None]
    k_cache.swapaxes(1, 2)[unused] = 1e18
    v_cache.swapaxes(1, 2)[unused] = -1e18
    return q, k_cache, v_cache, k_block, v_block


def dense(q, k_cache, v_cache, k_block, v_block, *, causal, window):
    """Each query over the concatenated real keys only, in fp64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k_cache.shape[1]
    for row, length in enumerate(LENGTHS):
        for head in range(q.shape[2]):
            kv = head // group
            keys = np.concatenate([k_cache[row, kv, :length], k_block[row, :, kv]]).astype(float)
            values = np.concatenate([v_cache[row, kv, :length], v_block[row, :, kv]]).astype(float)
            position = np.arange(length + BLOCK)
            for t in range(BLOCK):
                seen = np.ones(length + BLOCK, bool)
                if causal:
                    seen &= position <= length + t
                if window is not None:
                    seen &= np.abs(position - (length + t)) < window
                score = keys[seen] @ q[row, t, head].astype(float) * 0.3
                weight = np.exp(score - score.max())
                out[row, t, head] = weight @ values[seen] / weight.sum()
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 17])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_matches_dense_softmax(heads, kv_heads, causal, window):
    """Grouped heads, both directions, windows, ragged lengths; junk beyond a length is not read."""
    args = inputs(heads, kv_heads)
    run = jax.jit(functools.partial(block_attention, scale=0.3, causal=causal, window=window))
    got = run(*args, jnp.asarray(LENGTHS))
    assert_close(got, dense(*args, causal=causal, window=window), LAYER)


@pytest.mark.parametrize("window", [3, 8])
def test_a_ring_gives_what_a_long_cache_gives(window):
    """Tokens come in pieces of any width, some wider than the ring; pieces are then rejected in
    part and their slots written again. Queries see what a cache with a slot for each token shows.
    """
    rng = np.random.default_rng(window)
    long = jnp.asarray(rng.normal(size=(2, 2, 64, WIDTH)), jnp.float32)
    ring = jnp.asarray(rng.normal(size=(2, 2, window + BLOCK, WIDTH)), jnp.float32)
    attend = functools.partial(block_attention, scale=0.3, causal=True, window=window)
    length = jnp.array([0, 0])
    for width, keep in [(20, [20, 17]), (1, [1, 1]), (6, [2, 6]), (6, [0, 1]), (6, [6, 3])]:
        rows = jnp.asarray(rng.normal(size=(2, width, 2, WIDTH)), jnp.float32)
        q = jnp.asarray(rng.normal(size=(2, width, 4, WIDTH)), jnp.float32)
        wanted = attend(q, long, long, rows, rows, length)
        got = attend(q, ring, ring, rows, rows, length, ring=True)
        assert_close(got, wanted, LAYER, f"piece of {width} at {length}")
        # Prefill writes real rows only; a drafted block is written whole and kept in part.
        count = jnp.array(keep if width > BLOCK else [width, width])
        long = write_rows(long, rows, length, count)
        ring = write_rows(ring, rows, length, count, ring=True)
        length = length + jnp.array(keep)


def test_a_ring_needs_a_window():
    arguments = [jnp.asarray(x) for x in (*inputs(4, 2), LENGTHS)]
    with pytest.raises(ValueError, match="window"):
        block_attention(*arguments, scale=1.0, causal=True, ring=True)


@pytest.mark.parametrize("ring", [False, True])
def test_context_before_first_is_as_if_it_were_not_there(ring):
    """A packed row's earlier documents; in a ring `first` counts positions, not slots."""
    q, k_cache, v_cache, k, v = inputs(4, 2)
    first, window = np.array([0, 1, 5, 11]), 18
    run = jax.jit(functools.partial(block_attention, scale=0.3, causal=True, window=window))
    # The same context moved to the front of the cache: nothing but distances counts.
    ahead = [np.stack([np.roll(row, -at, 1) for row, at in zip(c, first, strict=True)])
             for c in (k_cache, v_cache)]  # fmt: skip
    wanted = run(q, *ahead, k, v, jnp.asarray(LENGTHS - first))
    if ring:
        run = jax.jit(
            functools.partial(block_attention, scale=0.3, causal=True, window=window, ring=True)
        )
    got = run(q, k_cache, v_cache, k, v, jnp.asarray(LENGTHS), first=jnp.asarray(first))
    assert_close(got, wanted, LAYER)


def test_rows_do_not_touch_each_other():
    """A row whose cache and block are NaN leaves its neighbours as they are (A12)."""
    args = inputs(4, 2)
    run = jax.jit(functools.partial(block_attention, scale=0.3, causal=True))
    clean = np.array(run(*args, jnp.asarray(LENGTHS)))
    for array in args:
        array[2] = np.nan
    poisoned = np.array(run(*args, jnp.asarray(LENGTHS)))
    others = [0, 1, 3]
    np.testing.assert_array_equal(poisoned[others], clean[others])


def test_large_scores_stay_finite():
    q, *rest = inputs(4, 2)
    run = jax.jit(functools.partial(block_attention, scale=1e3, causal=False))
    assert np.isfinite(run(q, *rest, jnp.asarray(LENGTHS))).all()


@pytest.mark.parametrize("batch", [1, 6])
def test_bf16_stays_near_fp32(batch):
    """Every shape must run in bf16 on every backend, with bf16 rounding and no more."""
    keys = jax.random.split(jax.random.key(batch), 5)
    q = jax.random.normal(keys[0], (batch, 16, 4, 64))
    k_cache, v_cache = (jax.random.normal(key, (batch, 2, 96, 64)) for key in keys[1:3])
    k, v = (jax.random.normal(key, (batch, 16, 2, 64)) for key in keys[3:])
    length = jnp.full((batch,), 80)
    arguments = (q, k_cache, v_cache, k, v)
    attend = jax.jit(functools.partial(block_attention, scale=0.125, causal=True))
    exact = attend(*(x.astype(jnp.bfloat16).astype(jnp.float32) for x in arguments), length)
    narrow = attend(*(x.astype(jnp.bfloat16) for x in arguments), length)
    assert narrow.dtype == jnp.bfloat16
    assert np.abs(np.asarray(narrow, np.float32) - np.asarray(exact)).max() < 0.03


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(256, 16, 4), (512, 8, 2), (256, 8, 1)])
def test_no_width_of_a_pass_takes_a_tile_whose_registers_spill(width, heads, kv_heads):
    """Of wide heads that is one of 32 rows; a server verifies 1, 4, 8 or 16 tokens."""
    for tokens in (1, 2, 4, 8, 16):
        q = jnp.zeros((1, tokens, heads, width), jnp.bfloat16)
        cache = jnp.zeros((1, kv_heads, 4096, width), jnp.bfloat16)
        rows = gpu_tile.own_tile(q, cache, None).rows
        assert rows == (16 if tokens * heads // kv_heads <= 16 else 64), tokens
