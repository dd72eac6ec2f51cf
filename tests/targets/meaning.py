"""What a Qwen3.5 cache means, whatever still waits to be folded in."""

import jax
import numpy as np

from mmflash_jax.targets.qwen3_5 import AttentionCache, Cache
from pallas_kernels import commit_gated_delta
from tests.tolerances import STATE, assert_close

fold = jax.jit(commit_gated_delta)


def logical(cache: Cache, length: np.ndarray, taps: int) -> list[list[np.ndarray]]:
    """Per row, what the cache means: folded delta states, the last convolution inputs, and keys
    and values of the tokens that count."""
    pending = np.asarray(cache.pending)
    rows: list[list[np.ndarray]] = [[] for _ in length]
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            for row, count in enumerate(length):
                rows[row] += [np.asarray(layer.k)[row, :, :count]]
                rows[row] += [np.asarray(layer.v)[row, :, :count]]
            continue
        state = fold(layer.state, layer.keys, layer.updates, layer.decay, cache.pending)
        for row, keep in enumerate(pending):
            rows[row] += [np.asarray(state)[row]]
            rows[row] += [np.asarray(layer.rows)[row, keep : keep + taps - 1]]
    return rows


def assert_same_meaning(got, wanted, what):
    for place, (one, two) in enumerate(zip(got, wanted, strict=True)):
        assert_close(one, two, STATE, f"{what}, part {place}")
