"""The drafter that proposes nothing: plain decoding through the same loop."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.base import Heads, Proposal
from mmflash_jax.layers.schema import Params


@dataclass(frozen=True)
class NoDraft:
    """A block of one token; see `drafters.base.Drafter`."""

    block: int = 1
    capture: tuple[int, ...] = ()

    def init_state(self, batch: int, capacity: int) -> tuple[()]:
        return ()

    def absorb(
        self, params: Params, state: tuple[()], features: Float[Array, "B T 0"],
        length: Int[Array, " B"], count: Int[Array, " B"],
    ) -> tuple[()]:  # fmt: skip
        return state

    def propose(
        self, params: Params, state: tuple[()], anchor: Int[Array, " B"],
        length: Int[Array, " B"], heads: Heads,
    ) -> Proposal:  # fmt: skip
        return Proposal(ids=jnp.zeros((anchor.shape[0], 0), jnp.int32))
