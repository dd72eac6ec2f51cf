"""A step of the gated delta rule over a single token after a single one: one kernel, no products of
matrices. A program takes one value head of one batch row."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.gated_delta.gpu_inputs import (
    Convolution,
    Sizes,
    convolved,
    gates,
    inverse_norm,
    parts_of,
    per_token,
)


def step(
    sizes: Sizes, columns: int, ring_ref: Any, new_ref: Any, kernel_ref: Any, a_ref: Any,
    b_ref: Any, A_log_ref: Any, dt_bias_ref: Any, length_ref: Any, count_ref: Any, pending_ref: Any,
    G_ref: Any, state_ref: Any, update_ref: Any, ring_out: Any, G_out: Any, out_ref: Any,
    state_out: Any, update_out: Any,
) -> None:  # fmt: skip
    """The program of one value head of one row, some `columns` of its state after the other."""
    # First, because it takes longest to come.
    state = state_ref[:, pl.ds(0, columns)]
    head, keep = pl.program_id(0) % sizes.value_heads, pending_ref[0]
    source = Convolution(ring_ref, new_ref, kernel_ref, ring_out)
    *sides, values = parts_of(sizes, head, length_ref[0], count_ref[0], keep)
    old_key, q, k = (x.astype(jnp.float32) for x in convolved(sizes, source, sides))
    old_key, k = old_key * inverse_norm(old_key)[:, None], k * inverse_norm(k)[:, None]
    q = q * (inverse_norm(q) * sizes.kd**-0.5)[:, None]
    real = jnp.arange(1) < 1
    a, b = per_token(a_ref, real), per_token(b_ref, real)
    G, beta = gates(a, b, A_log_ref[0], dt_bias_ref[0], real)

    def column(x: Array) -> Array:
        return jnp.sum(x, axis=0)[:, None]

    fade, grown = jnp.where(keep > 0, jnp.exp(G_ref[0]), 1.0), jnp.exp(G)[:, None]
    alike = jnp.sum(q * k, axis=1)[:, None]
    for first in range(0, sizes.vd, columns):
        at = pl.ds(first, columns)
        if first:
            state = state_ref[:, at]
        some = dataclasses.replace(values, channel=values.channel + first, width=columns)
        (v,) = convolved(sizes, source, [some])
        record = jnp.where(keep > 0, update_ref[:, at], 0.0)
        state = fade * state + column(old_key) * record
        told = jnp.sum(column(k) * state, axis=0)[None, :]
        asked = jnp.sum(column(q) * state, axis=0)[None, :]
        update = beta[:, None] * (v.astype(jnp.float32) - grown * told)
        out = grown * asked + alike * update
        state_out[:, at], update_out[:, at] = state, update
        out_ref[:, at] = out.astype(out_ref.dtype)
    G_out[...] = G
