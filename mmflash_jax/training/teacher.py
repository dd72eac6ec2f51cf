"""The frozen target over whole rows: what training and visual scoring learn from."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmflash_jax.decode.records import Plan
from mmflash_jax.layers.schema import Params
from mmflash_jax.targets import TargetOutput


def whole_rows(
    plan: Plan,
    target_params: Params,
    ids: Int[Array, "B S"],
    media: Float[Array, "M D"] | None,
    media_idx: Int[Array, "B S"],
    positions: Int[Array, "A B S"],
    total_len: Int[Array, " B"],
) -> TargetOutput:
    """One teacher-forced pass; features are those that the plan's drafter captures.

    A row is one block of decided tokens: nothing comes before it, so its cache has no use.
    """
    rows = ids.shape[0]
    return plan.target.prefill(
        target_params,
        plan.target.embed(target_params, ids, media, media_idx),
        positions,
        plan.target.init_cache(rows, 1, 1),
        jnp.zeros((rows,), jnp.int32),
        total_len,
        capture=plan.drafter.capture,
    )
