"""Drafters for tests only: they know or guess the answer from a table.

One program serves all of them, because the table travels as parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.drafters import Anchor, Context, Heads, Proposal
from pallas_kernels import ancestors_of, depths_of, write_rows
from tests.targets.trees import random_parents

PLACES = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was absorbed: features `[B, 1, S, F]`, and how often each slot was written."""

    features: Any
    writes: Any


@dataclass(frozen=True)
class Scripted:
    """Drafts `ids` of its table by token index; the first `right` stay, the rest are changed.

    `right[b, n]` is the number of drafts left as they are in the block whose anchor is token n.
    """

    block: int = 8
    capture: tuple[int, ...] = ()
    features: int = 0
    vocabulary: int = 288

    def init_state(self, batch: int, capacity: int) -> Seen:
        return Seen(
            features=jnp.zeros((batch, 1, capacity, self.features)),
            writes=jnp.zeros((batch, capacity), jnp.int32),
        )

    def absorb(self, params: Any, state: Seen, context: Context) -> Seen:
        features, length, count = context.features, context.length, context.count
        place = jnp.arange(features.shape[1])
        capacity = state.writes.shape[1]
        slot = jnp.where(place < count[:, None], length[:, None] + place, capacity)
        rows = jnp.arange(len(slot))[:, None]
        return Seen(
            features=write_rows(state.features, features[:, :, None], length, count),
            writes=state.writes.at[rows, slot].add(1, mode="drop"),
        )

    def propose(self, params: Any, state: Seen, anchor: Anchor, heads: Heads) -> Proposal:
        length = anchor.length
        draft = jnp.arange(self.block - 1)
        place = jnp.minimum(length[:, None] + 1 + draft, PLACES - 1)
        ids = jnp.take_along_axis(params["ids"], place, axis=1)
        right = jnp.take_along_axis(params["right"], length[:, None], axis=1)
        return Proposal(ids=jnp.where(draft < right, ids, (ids + 1) % self.vocabulary))


@dataclass(frozen=True)
class Branching(Scripted):
    """Drafts trees: node i of the block whose anchor is token n hangs at `parents[b, n, i]` and is
    the table's id of its place if `right[b, n, i]`, another one else. Siblings may be equal."""

    def propose(self, params: Any, state: Seen, anchor: Anchor, heads: Heads) -> Proposal:
        at = anchor.length[:, None, None]
        parents = jnp.take_along_axis(params["parents"], at, axis=1)[:, 0]
        right = jnp.take_along_axis(params["right"], at, axis=1)[:, 0]
        place = anchor.length[:, None] + depths_of(ancestors_of(parents))
        ids = jnp.take_along_axis(params["ids"], jnp.minimum(place, PLACES - 1), axis=1)
        other = (ids + 1 + jnp.arange(self.block)) % self.vocabulary
        return Proposal(ids=jnp.where(right, ids, other)[:, 1:], parents=parents)


@dataclass(frozen=True)
class Shadowed:
    """Drafts by its table, and lets another drafter absorb what is accepted.

    Parameters are {"script": of `Scripted`, "other": of the other drafter}.
    """

    script: Scripted
    other: Any

    @property
    def block(self) -> int:
        return self.script.block

    @property
    def capture(self) -> tuple[int, ...]:
        return self.other.capture

    def init_state(self, batch: int, capacity: int) -> Any:
        return self.other.init_state(batch, capacity)

    def absorb(self, params: Any, state: Any, context: Context) -> Any:
        return self.other.absorb(params["other"], state, context)

    def propose(self, params: Any, state: Any, anchor: Anchor, heads: Heads) -> Proposal:
        return self.script.propose(params["script"], state, anchor, heads)


def table(sequences: Sequence[Sequence[int]], right: Any) -> dict[str, np.ndarray]:
    """Parameters of `Scripted`: whole sequences (prompt and answer), and the drafts to leave.

    `right` is one number, or an array that broadcasts to `[B, PLACES]`.
    """
    ids = np.zeros((len(sequences), PLACES), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    counts = np.broadcast_to(np.asarray(right, np.int32), ids.shape)
    return {"ids": ids, "right": np.array(counts)}


def oracle(sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Always right."""
    return table(sequences, PLACES)


def adversarial(sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Always wrong."""
    return table(sequences, 0)


def random(sequences: Sequence[Sequence[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Any ids at all."""
    rng = np.random.default_rng(seed)
    return table(rng.integers(0, 256, (len(sequences), PLACES)).tolist(), PLACES)


def ragged(
    sequences: Sequence[Sequence[int]], seed: int = 0, most: int = 8
) -> dict[str, np.ndarray]:
    """Right for a random number of drafts, another one at each place of each row."""
    rng = np.random.default_rng(seed)
    return table(sequences, rng.integers(0, most, (len(sequences), PLACES)))


def branching(
    sequences: Sequence[Sequence[int]], seed: int = 0, right: float = 0.6, block: int = 8
) -> dict[str, np.ndarray]:
    """Parameters of `Branching`: another tree at each place of each row, some nodes right."""
    rng = np.random.default_rng(seed)
    made = table(sequences, 0)
    shape = (len(sequences), PLACES)
    parents = random_parents(rng, shape[0] * shape[1], block).reshape(*shape, block)
    return {
        "ids": made["ids"], "parents": parents, "right": rng.random((*shape, block)) < right
    }  # fmt: skip
