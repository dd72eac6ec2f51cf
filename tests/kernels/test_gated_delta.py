"""Block and chunked forms of the gated delta rule against the recurrence in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    commit_gated_delta,
    gated_delta_block,
    gated_delta_chunked,
    gated_delta_sequential,
)
from tests.tolerances import LAYER, assert_close

# Key heads, value heads, key width, value width: value heads in groups, widths that differ.
SHAPES = [(2, 4, 16, 24), (3, 3, 8, 4), (1, 4, 8, 8)]
# Spread of the keys around one common key; the formulas differ most where keys are alike.
SPREADS = {"independent": None, "correlated": 0.3, "nearly the same": 1e-3, "the same": 0.0}


def unit(x):
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)


def inputs(T, shape, *, spread=None, batch=2, seed=0):
    """q, k, v, g, beta and a start state; the last dims as in the operation."""
    key_heads, value_heads, key_dim, value_dim = shape
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(batch, T, key_heads, key_dim))
    if spread is not None:
        k = rng.normal(size=(batch, 1, key_heads, key_dim)) + spread * k
    q = unit(rng.normal(size=k.shape)) * key_dim**-0.5
    v = rng.normal(size=(batch, T, value_heads, value_dim))
    # Half-lives from less than a token to thousands of tokens, as trained models have.
    g = -np.exp(rng.uniform(-8, 1, (batch, T, value_heads)))
    beta = rng.uniform(0.05, 1.0, (batch, T, value_heads))
    state = rng.normal(size=(batch, value_heads, key_dim, value_dim))
    return tuple(x.astype(np.float32) for x in (q, unit(k), v, g, beta, state))


def recurrence(q, k, v, g, beta, state):
    """Outputs and the state after 0, 1 .. T tokens, in fp64."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    group = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, group, axis=2), np.repeat(k, group, axis=2)
    states, outs = [state], []
    for t in range(v.shape[1]):
        state = np.exp(g[:, t])[..., None, None] * state
        d = beta[:, t, :, None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * d[:, :, None]
        outs.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
        states.append(state)
    return np.stack(outs, 1), states


block = jax.jit(gated_delta_block)
commit = jax.jit(commit_gated_delta)
chunked = jax.jit(gated_delta_chunked, static_argnames="chunk")
sequential = jax.jit(gated_delta_sequential)


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
@pytest.mark.parametrize("shape", SHAPES)
def test_block_and_commit_follow_the_recurrence(shape, spread):
    """Outputs of a block of 16, and the state for every number of tokens kept."""
    args = inputs(16, shape, spread=spread)
    outs, states = recurrence(*args)
    out, update, decay = block(*args)
    assert_close(out, outs, LAYER, "outputs")
    for keep in range(17):
        kept = commit(args[-1], args[1], update, decay, jnp.full((2,), keep))
        assert_close(kept, states[keep], LAYER, f"state after {keep}")


def test_each_row_keeps_its_own_number():
    args = inputs(16, SHAPES[0], batch=4)
    _, states = recurrence(*args)
    _, update, decay = block(*args)
    kept = commit(args[-1], args[1], update, decay, jnp.array([0, 1, 9, 16]))
    for row, keep in enumerate([0, 1, 9, 16]):
        assert_close(kept[row], states[keep][row], LAYER, f"row {row}")


def test_keeping_nothing_returns_the_state_bit_for_bit():
    args = inputs(16, SHAPES[0])
    _, update, decay = block(*args)
    kept = commit(args[-1], args[1], update, decay, jnp.zeros((2,), jnp.int32))
    np.testing.assert_array_equal(kept, args[-1])


def test_rejected_tokens_leave_no_trace():
    """What stands behind the kept tokens does not reach the committed state (A15)."""
    clean, dirty = inputs(16, SHAPES[0]), inputs(16, SHAPES[0])
    other = inputs(16, SHAPES[0], seed=1)
    for place, array in enumerate(dirty[:5]):
        array[:, 5:] = other[place][:, 5:]
    dirty[2][:, 5:] *= 1e6
    states = []
    for args in (clean, dirty):
        _, update, decay = block(*args)
        states.append(commit(args[-1], args[1], update, decay, jnp.full((2,), 5)))
    assert_close(states[1], states[0], LAYER)


@pytest.mark.parametrize("spread", [None, 1e-3])
@pytest.mark.parametrize(("T", "chunk"), [(1, 64), (40, 16), (64, 64), (70, 64)])
def test_chunked_and_sequential_follow_the_recurrence(T, chunk, spread):
    args = inputs(T, SHAPES[0], spread=spread)
    outs, states = recurrence(*args)
    for run in (lambda *a: chunked(*a, chunk=chunk), sequential):
        out, state = run(*args)
        assert_close(out, outs, LAYER, "outputs")
        assert_close(state, states[-1], LAYER, "state")


def test_masked_padding_leaves_the_state_untouched():
    """Right padding with g = beta = 0 counts for nothing, whatever its keys and values are."""
    q, k, v, g, beta, state = inputs(48, SHAPES[0])
    real = np.arange(48)[None, :, None] < np.array([30, 7])[:, None, None]
    for array in (q, k, v):
        array[~real[..., 0]] = 50.0
    g, beta = np.where(real, g, 0).astype(np.float32), np.where(real, beta, 0).astype(np.float32)
    _, padded = chunked(q, k, v, g, beta, state, chunk=16)
    for row, count in enumerate([30, 7]):
        _, states = recurrence(
            *(x[row : row + 1, :count] for x in (q, k, v, g, beta)), state=state[row : row + 1]
        )
        assert_close(padded[row], states[-1][0], LAYER, f"row {row}")


def test_strong_decay_stays_finite():
    """exp(G_i - G_j) above the diagonal would overflow if it were not masked before exp."""
    args = list(inputs(16, SHAPES[0]))
    args[3] = np.full_like(args[3], -40.0)
    outs, states = recurrence(*args)
    out, update, decay = block(*args)
    assert_close(out, outs, LAYER, "outputs")
    kept = commit(args[-1], args[1], update, decay, jnp.full((2,), 16))
    assert_close(kept, states[-1], LAYER, "state")
