"""Hidden states of a target that a draft asks for by number."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

AFTER_NORM = -1
"""Beside the indices of layers: the hidden state after the final norm, what the head takes."""


def join_captured(
    captured: Mapping[int, Float[Array, "B T D"]],
    capture: tuple[int, ...],
    hidden: Float[Array, "B T D"],
) -> Float[Array, "B T features"]:
    """Features in the asked order, side by side; `hidden` is the one after the final norm."""
    parts = [hidden if index == AFTER_NORM else captured[index] for index in capture]
    return jnp.concatenate(parts or [hidden[..., :0]], axis=-1)
