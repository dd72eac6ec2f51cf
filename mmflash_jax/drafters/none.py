"""The drafter that proposes nothing: plain decoding through the same loop."""

from dataclasses import dataclass

import jax.numpy as jnp

from mmflash_jax.drafters.base import Anchor, Context, Heads, Proposal
from mmflash_jax.layers.schema import Params


@dataclass(frozen=True)
class NoDraft:
    """A block of one token; see `drafters.base.Drafter`."""

    block: int = 1
    capture: tuple[int, ...] = ()

    def init_state(self, batch: int, capacity: int) -> tuple[()]:
        return ()

    def absorb(self, params: Params, state: tuple[()], context: Context) -> tuple[()]:
        return state

    def propose(self, params: Params, state: tuple[()], anchor: Anchor, heads: Heads) -> Proposal:
        return Proposal(ids=jnp.zeros((anchor.ids.shape[0], 0), jnp.int32))
