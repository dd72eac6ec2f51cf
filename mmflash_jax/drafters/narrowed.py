"""A drafter of which only the first drafts are verified: cheaper steps, fewer tokens each."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.base import Drafter, DraftState, Heads, Proposal
from mmflash_jax.layers.schema import Params


@dataclass(frozen=True)
class Narrowed:
    """`drafter`, with blocks of `width` tokens verified; at width 1 it does not draft at all.

    Its state is that of the whole drafter and stays complete, so widths may change between steps.
    See `drafters.base.Drafter`.
    """

    drafter: Drafter
    width: int

    @property
    def block(self) -> int:
        """Of the whole drafter: what caches are laid out for."""
        return self.drafter.block

    @property
    def capture(self) -> tuple[int, ...]:
        return self.drafter.capture

    def init_state(self, batch: int, capacity: int) -> DraftState:
        return self.drafter.init_state(batch, capacity)

    def absorb(
        self,
        params: Params,
        state: DraftState,
        features: Float[Array, "B T features"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> DraftState:
        return self.drafter.absorb(params, state, features, length, count)

    def propose(
        self, params: Params, state: Any, anchor: Int[Array, " B"], length: Int[Array, " B"],
        heads: Heads,
    ) -> Proposal:  # fmt: skip
        if self.width == 1:
            return Proposal(ids=jnp.zeros((anchor.shape[0], 0), jnp.int32))
        proposal = self.drafter.propose(params, state, anchor, length, heads)
        return Proposal(ids=proposal.ids[:, : self.width - 1])
