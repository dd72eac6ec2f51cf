"""Where drafts fail, by how much of an answer token is owed to the picture.

A verify step tries its drafted slots one after the other: slot k is *tried* if all before it were
right, and then accepted or rejected. The token that the target itself says at that place has a
visual score in nats (training/divergence.py), so every tried slot has one too. Slot 16 of a block
of 16 is none: the token there is the target's, whatever was drafted.

Buckets of scored tokens, over all places of held-out answers that a draft can reach (not the first,
which is prefill's): `zero` below `ZERO` nats, `top` the highest fifth of all scored tokens,
`middle` the others. If more than four fifths are zero, `top` is what is left.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from mmflash_jax.engine.offline import Completion

BUCKETS = ("top", "middle", "zero")
TOP_SHARE = 0.2
ZERO = 0.01
"""Nats. Below this the picture does not move what the target says."""


class Places(NamedTuple):
    """Places of answers that a step committed, in order; every field is `[n]`.

    slot: 1 .. block, the place's number in its step. tried: slot < block. accepted: the draft said
    what the target says. score: nats, NaN where unknown. step: number of the step over all answers.
    """

    slot: np.ndarray
    tried: np.ndarray
    accepted: np.ndarray
    score: np.ndarray
    step: np.ndarray


def places_of_steps(
    completions: Sequence[Completion], scores: Sequence[np.ndarray | None]
) -> Places:
    """Every committed place of every answer.

    scores: nats of each answer's tokens, None for answers without pictures; a shorter array leaves
        the places after it unknown.
    """
    parts, steps = [], 0
    for completion, score in zip(completions, scores, strict=True):
        accepted = completion.drafted[1:]
        count = len(accepted)
        # A step ends at the target's own token, or where the answer does.
        begins = np.concatenate([[True], ~accepted[:-1]])[:count]
        first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
        slot = np.arange(count) - first + 1
        known = np.full(count, np.nan, np.float32)
        if score is not None:
            after_first = score[1 : count + 1]
            known[: len(after_first)] = after_first
        tried = slot < len(completion.committed)
        parts.append(Places(slot, tried, accepted, known, steps + np.cumsum(begins)))
        steps += int(begins.sum())
    return Places(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def bucket_of(score: np.ndarray) -> tuple[np.ndarray, float | None]:
    """The bucket of each score, "" where it is NaN, and the least score of the top fifth."""
    known = np.sort(score[~np.isnan(score)])
    if not len(known):
        return np.full(len(score), "", "<U6"), None
    lowest = float(known[-int(np.ceil(TOP_SHARE * len(known)))])
    conditions = [np.isnan(score), score < ZERO, score >= lowest]
    return np.select(conditions, ["", "zero", "top"], "middle"), lowest


def share_of_top(score: np.ndarray, weight: np.ndarray) -> float | None:
    """Share of all weight on scored tokens that lies on the `top` bucket; same shapes."""
    bucket, _ = bucket_of(score.ravel())
    weight = weight.ravel().astype(np.float64)
    total = weight[bucket != ""].sum()
    return float(weight[bucket == "top"].sum() / total) if total else None


def visual_figures(
    completions: Sequence[Completion], scores: Sequence[np.ndarray | None]
) -> dict[str, Any]:
    """Acceptance by visual bucket, and how rejections go with the score.

    - `acceptance_by_visual_bucket`: accepted slots of tried slots.
    - `tau_by_visual_bucket`: mean tokens committed by steps whose first drafted place, the one
      after the anchor, is in the bucket.
    - `visual_buckets`: share of scored tokens, tried slots and steps of each, and its bounds in
      nats.
    - `rejection_correlation`: between the score of tried slots and their rejection (0 or 1):
      `pearson` of the score as it is (so point-biserial), `spearman` of its rank. None if one of
      the two never changes.

    Parameters as for `places_of_steps`.
    """
    places = places_of_steps(completions, scores)
    bucket, lowest = bucket_of(places.score)
    scored = bucket != ""
    _, first, committed = np.unique(places.step, return_index=True, return_counts=True)
    figures: dict[str, Any] = {
        "acceptance_by_visual_bucket": {},
        "tau_by_visual_bucket": {},
        "visual_buckets": {"zero_below": ZERO, "top_from": lowest},
        "rejection_correlation": _correlation(places),
    }
    for name in BUCKETS:
        here = bucket == name
        tried = here & places.tried
        began = here[first]
        figures["acceptance_by_visual_bucket"][name] = _mean(places.accepted[tried])
        figures["tau_by_visual_bucket"][name] = _mean(committed[began])
        figures["visual_buckets"][name] = {
            "share": float(here.sum() / max(scored.sum(), 1)),
            "tried": int(tried.sum()),
            "steps": int(began.sum()),
        }
    return figures


def _correlation(places: Places) -> dict[str, float | None]:
    known = places.tried & ~np.isnan(places.score)
    score, rejected = places.score[known].astype(np.float64), ~places.accepted[known]
    if not known.any() or rejected.all() or not rejected.any() or score.min() == score.max():
        return {"pearson": None, "spearman": None}
    return {
        "pearson": float(np.corrcoef(score, rejected)[0, 1]),
        # Ranks of a value that is 0 or 1 are a straight line of it.
        "spearman": float(np.corrcoef(rankdata(score), rejected)[0, 1]),
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
