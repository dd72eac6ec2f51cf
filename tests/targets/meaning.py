"""What a target's cache means, whatever still waits to be folded in."""

import functools
from typing import Any

import jax
import numpy as np

from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.targets import Target, gemma4, qwen3_5
from pallas_kernels import commit_gated_delta
from tests.tolerances import STATE, assert_close

Meaning = list[list[np.ndarray]]
fold = jax.jit(commit_gated_delta)


def logical(target: Target, cache: Any, length: np.ndarray) -> Meaning:
    """Per row, what the cache means to any later token, in an order that depends on the target
    alone."""
    return _of(cache, target, length)


@functools.singledispatch
def _of(cache: Any, target: Any, length: np.ndarray) -> Meaning:
    raise TypeError(f"no meaning known for a {type(cache).__name__}")


@_of.register
def _(cache: qwen3_5.Cache, target: qwen3_5.Qwen35, length: np.ndarray) -> Meaning:
    """Folded delta states, the last convolution inputs, keys and values of the tokens that
    count."""
    pending = np.asarray(cache.pending)
    taps = target.config.linear_conv_kernel_dim
    rows: Meaning = [[] for _ in length]
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            for row, count in enumerate(length):
                rows[row] += _slots(layer, row, np.arange(count))
            continue
        state = fold(layer.state, layer.keys, layer.updates, layer.decay, cache.pending)
        for row, keep in enumerate(pending):
            rows[row] += [np.asarray(state)[row]]
            rows[row] += [np.asarray(layer.rows)[row, keep : keep + taps - 1]]
    return rows


@_of.register
def _(cache: gemma4.Cache, target: gemma4.Gemma4, length: np.ndarray) -> Meaning:
    """Keys and values of the tokens that count; in rings those within reach of the next token."""
    makers = [layer for i, layer in enumerate(target.config.layers) if layer.source == i]
    rows: Meaning = [[] for _ in length]
    for layer, stored in zip(makers, cache.layers, strict=True):
        for row, count in enumerate(length):
            first = 0 if layer.window is None else max(0, count - layer.window + 1)
            slots = np.arange(first, count)
            rows[row] += _slots(stored, row, slots % stored.k.shape[2])
    return rows


def _slots(layer: AttentionCache, row: int, slots: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(part)[row][:, slots] for part in (layer.k, layer.v)]


def assert_same_meaning(got, wanted, what):
    for place, (one, two) in enumerate(zip(got, wanted, strict=True)):
        assert_close(one, two, STATE, f"{what}, part {place}")
