"""A step of the gated delta rule over a single token after a single one: one kernel, no products of
matrices. A program takes one value head of one batch row."""

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
    sizes: Sizes, ring_ref: Any, new_ref: Any, kernel_ref: Any, a_ref: Any, b_ref: Any,
    A_log_ref: Any, dt_bias_ref: Any, length_ref: Any, count_ref: Any, pending_ref: Any, G_ref: Any,
    state_ref: Any, update_ref: Any, ring_out: Any, G_out: Any, out_ref: Any, state_out: Any,
    update_out: Any,
) -> None:  # fmt: skip
    """The program of one value head of one row."""
    # First, because it takes longest to come.
    state = state_ref[...]
    head, keep = pl.program_id(0) % sizes.value_heads, pending_ref[0]
    source = Convolution(ring_ref, new_ref, kernel_ref, ring_out)
    parts = parts_of(sizes, head, length_ref[0], count_ref[0], keep)
    old_key, q, k, v = (x.astype(jnp.float32) for x in convolved(sizes, source, parts))
    old_key, k = old_key * inverse_norm(old_key)[:, None], k * inverse_norm(k)[:, None]
    q = q * (inverse_norm(q) * sizes.kd**-0.5)[:, None]
    real = jnp.arange(1) < 1
    a, b = per_token(a_ref, real), per_token(b_ref, real)
    G, beta = gates(a, b, A_log_ref[0], dt_bias_ref[0], real)

    def column(x: Array) -> Array:
        return jnp.sum(x, axis=0)[:, None]

    record = jnp.where(keep > 0, update_ref[...], 0.0)
    state = jnp.where(keep > 0, jnp.exp(G_ref[0]), 1.0) * state + column(old_key) * record
    told = jnp.sum(column(k) * state, axis=0)[None, :]
    asked = jnp.sum(column(q) * state, axis=0)[None, :]
    grown = jnp.exp(G)[:, None]
    update = beta[:, None] * (v - grown * told)
    out = grown * asked + jnp.sum(q * k, axis=1)[:, None] * update
    state_out[...], update_out[...], G_out[...] = state, update, G
    out_ref[...] = out.astype(out_ref.dtype)
