"""Acceptance figures from the counts that the loop keeps.

tau is pooled: all tokens committed by verify steps over all verify steps, the bonus token
included, prefill's own token not. Acceptance at position k is the share of steps that kept at
least k drafts, so tau = 1 + the sum over positions.
"""

from collections.abc import Sequence

import numpy as np

from mmflash_jax.engine.offline import Completion


def pooled_tau(completions: Sequence[Completion]) -> float | None:
    """Tokens a verify step over all completions; None if no step was taken."""
    steps = sum(completion.steps for completion in completions)
    tokens = sum(len(completion.token_ids) - 1 for completion in completions)
    return tokens / steps if steps else None


def accepted_per_position(completions: Sequence[Completion]) -> list[float]:
    """Share of steps that kept at least k drafts, for k = 1 .. block - 1."""
    counts = np.sum([completion.committed for completion in completions], axis=0)
    steps = counts.sum()
    at_least = np.cumsum(counts[::-1])[::-1]
    return [float(share) for share in at_least[1:] / max(steps, 1)]
