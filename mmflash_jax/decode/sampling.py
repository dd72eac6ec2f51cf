"""Choosing tokens: the most likely one, or a sample that no draft and no neighbour can change.

A sample is the largest of log-probability plus Gumbel noise. The noise of a token comes from its
request's seed and its place in the answer alone, so a request draws the same answer alone or in a
batch, with a draft or without. The drafter picks from its own distribution with the same noise:
both pick the same token whenever the two distributions are close (coupling without communication,
Daliri, Musco and Suresh, arXiv 2408.07978). The target's pick is what is returned, accepted or not,
so whatever the draft does the answer is an exact sample of the target. The usual rejection rule
(arXiv 2211.17192) accepts a little more often, and gives another text for each draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from mmflash_jax.config import SamplingSettings
from mmflash_jax.decode.adjust import Adjustments, adjust
from mmflash_jax.layers.scores import Scores

EXCLUDED = -jnp.inf


GREEDY = SamplingSettings()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`SamplingSettings` of a batch; temperature is 0 in greedy rows. key: uint32 `[B, 2]`."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    key: UInt32[Array, "B 2"]


def gather(settings: Sequence[SamplingSettings]) -> Sampling | None:
    """The batch's settings; None if every row is greedy, which compiles leaner."""
    if all(one.is_greedy for one in settings):
        return None
    return pack(settings)


def pack(settings: Sequence[SamplingSettings]) -> Sampling:
    """The batch's settings as host arrays."""
    halves = [(one.seed >> 32, one.seed & 0xFFFFFFFF) for one in settings]
    made = {
        "temperature": np.array(
            [0.0 if one.is_greedy else one.temperature for one in settings], np.float32
        ),
        "top_k": np.array([min(one.top_k, 2**31 - 1) for one in settings], np.int32),
        "top_p": np.array([one.top_p for one in settings], np.float32),
        "min_p": np.array([one.min_p for one in settings], np.float32),
        "key": np.array(halves, np.uint32),
    }
    return Sampling(**made)


def choose(
    scored: Scores,
    sampling: Sampling | None,
    place: Int[Array, "B T"],
    adjustments: Adjustments | None = None,
    drafted: Int[Array, "B drafts"] | None = None,
    before: Bool[Array, "B T drafts"] | None = None,
) -> Int[Array, "B T"]:
    """The token at each `[B, T]` place, which is its index in the row's answer.

    Greedy rows take the most likely token, the lowest id among equals. `adjustments` act on the
    logits first, with the drafts that come before each place (decode/adjust.py). The noise is of
    the place alone, so places may repeat: siblings in a tree of drafts draw with the same noise.
    """

    def as_asked() -> Array:
        wanted = adjust(scored.make(), adjustments, drafted, before)
        return jnp.argmax(scores(wanted, sampling, place), axis=-1).astype(jnp.int32)

    return _if_asked(sampling, adjustments, as_asked, scored.likeliest)


def rank(
    logits: Float[Array, "B T V"],
    sampling: Sampling | None,
    place: Int[Array, "B T"],
    adjustments: Adjustments | None = None,
) -> Float[Array, "B T V"]:
    """How likely a draft holds each token to be the target's choice, as fp32 log-probabilities.

    In greedy rows they are the draft's own. A sampled token is the largest of log-probability plus
    noise, and the noise is known: there they are the softmax of that sum.
    """

    def as_asked() -> Array:
        return scores(adjust(logits, adjustments), sampling, place).astype(jnp.float32)

    wanted = _if_asked(sampling, adjustments, as_asked, lambda: logits.astype(jnp.float32))
    return jax.nn.log_softmax(wanted, axis=-1)


def _if_asked(
    sampling: Sampling | None,
    adjustments: Adjustments | None,
    as_asked: Callable[[], Array],
    plain: Callable[[], Array],
) -> Array:
    """`as_asked` if some row samples or adjusts its logits: these are dozens of passes over the
    vocabulary."""
    asked = [] if sampling is None else [jnp.any(sampling.temperature > 0)]
    asked += [] if adjustments is None else [jnp.any(adjustments.active)]
    return lax.cond(jnp.any(jnp.stack(asked)), as_asked, plain) if asked else plain()


def scores(
    logits: Float[Array, "B T V"], sampling: Sampling | None, place: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """What the chosen token is the largest of: logits, or log-probabilities plus noise."""
    if sampling is None:
        return logits
    noisy = log_probabilities(logits, sampling) + _noise(sampling.key, place, logits.shape[-1])
    return jnp.where((sampling.temperature > 0)[:, None, None], noisy, logits)


def log_probabilities(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """fp32 log-distribution that a row samples from; tokens filtered out are -inf.

    Greedy rows are treated as of temperature 1.
    """
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    logp = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature[:, None, None], axis=-1)
    p = jnp.exp(logp)
    keep = p >= sampling.min_p[:, None, None] * p.max(axis=-1, keepdims=True)
    k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    keep &= _largest(p * keep, jnp.ones_like(p), k[:, None].astype(jnp.float32))
    left = p * keep
    # Mass is counted among what the other filters left.
    nucleus = _largest(left, left, sampling.top_p[:, None] * left.sum(axis=-1))
    keep &= nucleus | (sampling.top_p == 1)[:, None, None]
    return jax.nn.log_softmax(jnp.where(keep, logp, EXCLUDED), axis=-1)


def _largest(
    values: Float[Array, "B T V"], weights: Float[Array, "B T V"], wanted: Float[Array, "B _"]
) -> Bool[Array, "B T V"]:
    """The fewest of the largest values whose weights reach `wanted`; equal values stay together.

    Bisection over the bits of non-negative floats, which order as integers do: 31 sums over the
    vocabulary, cheaper than sorting it.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        enough = jnp.where(bits >= middle[..., None], weights, 0.0).sum(axis=-1) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    shape = values.shape[:-1]
    infinity = 0x7F800000
    bounds = (jnp.zeros(shape, jnp.int32), jnp.full(shape, infinity, jnp.int32))
    threshold, _ = lax.fori_loop(0, 31, halve, bounds)
    return bits >= threshold[..., None]


def _noise(
    key: UInt32[Array, "B 2"], place: Int[Array, "B T"], vocabulary: int
) -> Float[Array, "B T V"]:
    """Gumbel noise of each place of each row's answer."""

    def one(key: Array, place: Array) -> Array:
        own = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), place)
        # The low-resolution kind never draws what is rarer than 2^-24.
        return jax.random.gumbel(own, (vocabulary,), jnp.float32, mode="high")

    return jax.vmap(jax.vmap(one, (None, 0)))(key, place)
