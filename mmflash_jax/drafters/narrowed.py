"""A drafter of which only the first drafts are verified: cheaper steps, fewer tokens each."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp

from mmflash_jax.drafters.base import Anchor, Chain, Context, Drafter, DraftState, Heads, Proposal
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

    def absorb(self, params: Params, state: DraftState, context: Context) -> DraftState:
        return self.drafter.absorb(params, state, context)

    def propose(self, params: Params, state: DraftState, anchor: Anchor, heads: Heads) -> Proposal:
        if self.width == 1:
            return Proposal(ids=jnp.zeros((anchor.ids.shape[0], 0), jnp.int32))
        drafter = self.drafter
        if isinstance(drafter, Chain):
            drafter = dataclasses.replace(drafter, draft_tokens=self.width - 1)
        proposal = drafter.propose(params, state, anchor, heads)
        # Parents come before their children, so the first nodes of a tree are a tree.
        parents = None if proposal.parents is None else proposal.parents[:, : self.width]
        return Proposal(ids=proposal.ids[:, : self.width - 1], parents=parents)
