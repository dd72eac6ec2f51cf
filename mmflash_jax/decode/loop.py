"""Drivers over the one step: a fused loop on the device."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from mmflash_jax.decode.records import DecodeState, Plan
from mmflash_jax.decode.step import step
from mmflash_jax.layers.schema import Params


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def decode(
    plan: Plan, params: Params, state: DecodeState, max_steps: Int[Array, ""] | int
) -> DecodeState:
    """Step until no row runs or `max_steps` are taken, without leaving the device.

    `state` is donated: its caches are updated in place and it must not be used again.
    """

    def more(carry: tuple[Array, DecodeState]) -> Array:
        taken, state = carry
        return (taken < max_steps) & jnp.any(state.running)

    def once(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        taken, state = carry
        return taken + 1, step(plan, params, state)

    return lax.while_loop(more, once, (jnp.int32(0), state))[1]
