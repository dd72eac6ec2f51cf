"""Synthetic acceptance: how much a step commits is drawn, whatever the draft said.

Random weights never agree. To time a method at a mean of committed tokens, `SyntheticRule` runs
the real acceptance with a comparison that always holds, and keeps as many tokens of it as are
drawn: of a chain the first ones, of a tree its deepest branch from the anchor down. All that
acceptance and commit do with a chain or a tree stays in the program.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mmflash_jax.decode.accept import accept, cut
from mmflash_jax.decode.records import Acceptance, DecodeState, Verification
from mmflash_jax.drafters import Eagle3, Proposal

BLOCK = 16
"""The block of DFlash and MMFlash, for which a tau is named."""
GOLDEN = 0.6180339887


def longest(drafter: Any) -> int:
    """The most tokens that a step can commit: a chain's whole block, a tree's depth and one."""
    if isinstance(drafter, Eagle3) and drafter.top_k > 1:
        return min(drafter.depth, drafter.draft_tokens) + 1
    return drafter.block


def mean_of(agree: float, block: int) -> float:
    """Mean of committed tokens where each draft agrees with probability `agree`, independently.

    Leviathan et al., arXiv 2211.17192.
    """
    return float(np.sum(agree ** np.arange(block)))


def agreement(tau: float, block: int) -> float:
    """The probability of agreement at which blocks commit `tau` tokens in the mean.

    Raises:
        ValueError: no probability does.
    """
    if not 1 <= tau <= block:
        raise ValueError(f"tau is {tau}, a block of {block} commits from 1 to {block} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle, block) < tau else (low, middle)
    return low


def quantiles(tau: float, block: int, steps: int = 512) -> tuple[int, ...]:
    """Committed counts `1 .. block` in ascending order, their mean within 1 / steps of `tau`."""
    # The probability of committing more than k tokens is agree^k.
    above = agreement(tau, block) ** np.arange(block)
    counts = (above[None, :] > (np.arange(steps)[:, None] + 0.5) / steps).sum(axis=1)
    return tuple(int(count) for count in np.sort(counts))


@dataclass(frozen=True)
class SyntheticRule:
    """Keeps a drawn number of tokens, each of `counts` equally often. Hashable, as a plan must be.

    A tree that is less deep than a drawn number gives all its depth.
    """

    counts: tuple[int, ...]

    def __call__(
        self,
        state: DecodeState,
        proposal: Proposal,
        verification: Verification,
        stop_ids: tuple[int, ...],
    ) -> Acceptance:
        whole = accept(state, proposal, verification, (), agrees=_always)
        row = jnp.arange(state.steps.shape[0])
        drawn = (state.steps * GOLDEN + row * GOLDEN**2) % 1.0
        table = jnp.asarray(self.counts, jnp.int32)
        count = table[(drawn * len(self.counts)).astype(jnp.int32)]
        decided = cut(state, whole.ids, jnp.minimum(count, whole.count), stop_ids)
        return dataclasses.replace(decided, path=whole.path)


def _always(drafted: Array, choice: Array) -> Array:
    """True for all ids, in a way that leaves the comparison in the program."""
    return (drafted == choice) | (drafted >= 0)
