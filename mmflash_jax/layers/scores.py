"""Scores of tokens whose logits are made only where somebody reads them."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Scores:
    """Of the next token at `[B, T]` places. Lives inside one traced program.

    places: T.
    make: gives fp32 logits `[B, T, V]`.
    find: gives the most likely of the plan's tokens without logits; None if logits are needed.
    """

    places: int
    make: Callable[[], Array]
    find: Callable[[], Array] | None = None

    @classmethod
    def of(cls, logits: Float[Array, "B T V"]) -> "Scores":
        """Of logits that are there already."""
        return cls(logits.shape[1], lambda: logits)

    def map(self, change: Callable[[Array], Array]) -> "Scores":
        """With logits that `change` makes of these, the most likely of the plan's tokens the
        same."""
        return Scores(self.places, lambda: change(self.make()), self.find)

    def likeliest(self) -> Int[Array, "B T"]:
        """The id of the largest logit, the lowest among equals."""
        if self.find is not None:
            return self.find()
        return jnp.argmax(self.make(), axis=-1).astype(jnp.int32)
