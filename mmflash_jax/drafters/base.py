"""What every drafter offers: the seam between a draft method and the decoding loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.schema import Params

DraftState = Any


class FitError(ValueError):
    """A draft and a target do not belong together; the message lists every field at fault."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted ids `[B, block - 1]` for the positions after the anchor."""

    ids: Array


def most_likely(logits: Array) -> Array:
    """The id of the largest logit, the lowest among equals: `[..., V]` -> `[...]`."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclass(frozen=True)
class Heads:
    """The target's token table and output head, which a draft borrows, and its way of choosing.

    embed: ids `[B, T]` -> unscaled rows `[B, T, D]`.
    logits: hidden `[..., D]` -> fp32 logits `[..., V]` without soft cap.
    pick: draft logits `[B, drafts, V]` -> ids, by the rule that the target's tokens are chosen by.
    """

    embed: Callable[[Array], Array]
    logits: Callable[[Array], Array]
    pick: Callable[[Array], Array] = most_likely


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens after the anchor, from the target's features of what came before."""

    @property
    def block(self) -> int:
        """Tokens of a block: the anchor and the drafts."""
        ...

    @property
    def capture(self) -> tuple[int, ...]:
        """Target layers whose raw outputs the drafter reads, 0-based, in order."""
        ...

    def init_state(self, batch: int, capacity: int) -> DraftState:
        """State of rows that have absorbed nothing."""
        ...

    def absorb(
        self,
        params: Params,
        state: DraftState,
        features: Float[Array, "B T features"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> DraftState:
        """Take in features of the first `count` tokens from position `length` on."""
        ...

    def propose(
        self,
        params: Params,
        state: DraftState,
        anchor: Int[Array, " B"],
        length: Int[Array, " B"],
        heads: Heads,
    ) -> Proposal:
        """Draft the block whose anchor sits at position `length`; the state does not change."""
        ...
