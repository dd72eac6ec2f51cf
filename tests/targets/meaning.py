"""What a target's cache means, whatever still waits to be folded in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.layers.schema import Params
from mmflash_jax.targets import Target, gemma4, qwen3_5
from pallas_kernels.gated_delta import fold_pending, from_ring
from tests.tolerances import STATE, assert_close

Meaning = list[list[np.ndarray]]
fold = jax.jit(fold_pending, static_argnames="key_heads")


def logical(target: Target, params: Params, cache: Any, length: np.ndarray) -> Meaning:
    """Per row, what the cache means to any later token, in an order that depends on the target
    alone."""
    return _of(cache, target, params, length)


@functools.singledispatch
def _of(cache: Any, target: Any, params: Params, length: np.ndarray) -> Meaning:
    raise TypeError(f"no meaning known for a {type(cache).__name__}")


@_of.register
def _(cache: qwen3_5.Cache, target: qwen3_5.Qwen35, params: Params, length: np.ndarray) -> Meaning:
    """Folded delta states, the last convolution inputs, keys and values of the tokens that
    count."""
    taps, key_heads = target.config.linear_conv_kernel_dim, target.config.linear_num_key_heads
    rows: Meaning = [[] for _ in length]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, AttentionCache):
            for row, count in enumerate(length):
                rows[row] += _slots(layer, row, np.arange(count))
            continue
        kernel = params["layers"][index]["linear_attn"]["conv1d"]
        state = fold(
            layer.rows, kernel, layer.state, layer.updates, layer.decay, jnp.asarray(length),
            cache.pending, key_heads=key_heads,
        )  # fmt: skip
        last = from_ring(layer.rows, jnp.asarray(length) - (taps - 1), taps - 1)
        for row in range(len(length)):
            rows[row] += [np.asarray(state)[row], np.asarray(last)[row]]
    return rows


@_of.register
def _(cache: gemma4.Cache, target: gemma4.Gemma4, params: Params, length: np.ndarray) -> Meaning:
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
