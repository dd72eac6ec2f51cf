"""From visual scores to weights of answer tokens: how much each counts in the draft's loss.

A weighting moves the mass of a sample's loss, it adds none: the mean weight over the supervised
tokens of a sample is one, so the learning rate keeps its meaning, and a sample's weights do not
depend on what stands beside it in a batch.
"""

from dataclasses import dataclass

import numpy as np

from mmflash_jax.config_train import VisualConfig

GROUP_SHARE = 0.2
"""Share of a sample's tokens in the group of high scores."""
FAINT = 1e-4
"""Scores in nats below this are rounding noise, not vision."""


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """What a sample's answer tokens count in training, for `data.make_row`.

    weight: fp32 `[T]`, mean one over the supervised tokens that fit a row; 0 for tokens that must
        not be a label.
    score: fp32 nats `[T]`, NaN where the sample has no picture; for evaluation by visual bucket.
    """

    weight: np.ndarray
    score: np.ndarray


def supervised_tokens(answer: np.ndarray, image_id: int) -> np.ndarray:
    """Bool `[T]`: answer tokens that may be a label.

    The first is not: a block foresees what comes after its anchor, and anchors are answer tokens.
    Image placeholders are not: no head can be asked for a picture.
    """
    place = np.arange(len(answer))
    return (place > 0) & (answer != image_id)


def token_weights(
    score: np.ndarray | None,
    confidence: np.ndarray | None,
    supervised: np.ndarray,
    settings: VisualConfig,
) -> np.ndarray:
    """fp32 weights `[T]` of one sample; only those of supervised tokens have a meaning.

    score, confidence: nats and the target's probability of each token; None without pictures,
    which makes every weight exactly 1, as `strength` 0 does. Tokens that are not supervised weigh
    1 and are not counted.
    """
    weights = np.ones(len(supervised), np.float32)
    if score is None or settings.strength == 0 or not supervised.any():
        return weights
    known = np.asarray(score, np.float64)[supervised]
    visual = known / (known + settings.tau)
    if settings.gate == "confidence":
        assert confidence is not None
        visual = visual * np.asarray(confidence, np.float64)[supervised]
    if settings.weighting == "groups":
        weights[supervised] = _by_group(visual, known)
    else:
        raw = 1.0 + settings.strength * visual
        weights[supervised] = into_box(raw, settings.low, settings.high)
    return weights


def into_box(raw: np.ndarray, low: float, high: float) -> np.ndarray:
    """`clip(scale * raw, low, high)` of the one scale that makes its mean 1.

    Clipping after the scale, rather than before, keeps mean and box true at once. The sum rises
    with the scale, in straight lines between the scales at which a value enters or leaves the box.
    """
    if raw.max() == raw.min() or low == 1 or high == 1:
        return np.ones_like(raw)
    count, order = len(raw), np.sort(raw)
    before = np.concatenate([[0.0], np.cumsum(order)])
    scales = np.sort(np.concatenate([low / order, high / order]))
    small = np.searchsorted(order, low / scales)
    large = np.maximum(np.searchsorted(order, high / scales), small)
    sums = small * low + (before[large] - before[small]) * scales + (count - large) * high
    # From count * low to count * high, which enclose count.
    at = int(np.searchsorted(sums, count))
    rise = (count - sums[at - 1]) / (sums[at] - sums[at - 1])
    scale = scales[at - 1] + rise * (scales[at] - scales[at - 1])
    return np.clip(scale * raw, low, high)


def _by_group(visual: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Half the mass to the fifth with the highest values, half to the others, even inside each.

    A fifth is rounded up, which keeps weights in [0.5, 2.5] for every length. A sample that shows
    no vision at all has no such group.
    """
    count = len(visual)
    top = int(np.ceil(count * GROUP_SHARE))
    if count < 2 or score.max() < FAINT:
        return np.ones(count)
    weights = np.full(count, count / (2 * (count - top)))
    weights[np.argsort(-visual, kind="stable")[:top]] = count / (2 * top)
    return weights
