"""Which drafted tokens stay. The only place with acceptance mathematics.

A draft stays while it equals the target's own choice given all before it. The choice is the most
likely token or a keyed sample (decode/sampling.py); either way the ids are those of plain decoding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from mmflash_jax.decode.records import LENGTH, RUNNING, STOP, Acceptance, DecodeState, Verification
from mmflash_jax.decode.sampling import choose
from mmflash_jax.drafters import Proposal


def accept(
    state: DecodeState, proposal: Proposal, verification: Verification, stop_ids: tuple[int, ...]
) -> Acceptance:
    """Keep the longest prefix of drafts that the target agrees with, and its next token."""
    place = state.num_tokens[:, None] + jnp.arange(verification.logits.shape[1])
    choice = choose(verification.logits, state.sampling, place)
    agree = proposal.ids == choice[:, :-1]
    accepted = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=-1), axis=-1)
    # Row `accepted` of `choice` is the bonus token, earlier rows equal the accepted drafts.
    return cut(state, choice, accepted + 1, stop_ids)


def cut(
    state: DecodeState,
    ids: Int[Array, "B block"],
    count: Int[Array, " B"],
    stop_ids: tuple[int, ...],
) -> Acceptance:
    """End each row at its first stop token, else at its limit, inside the block.

    Before that, `count` tokens of it hold, of which all but the last are drafts. A stop token in
    the last allowed place counts as a stop.
    """
    drafted = count - 1
    count = jnp.minimum(count, state.limit - state.num_tokens)
    place = jnp.arange(ids.shape[1])
    is_stop = jnp.isin(ids, jnp.asarray(stop_ids, jnp.int32)) & (place < count[:, None])
    stopped = is_stop.any(axis=-1)
    count = jnp.where(stopped, jnp.argmax(is_stop, axis=-1) + 1, count)
    full = state.num_tokens + count >= state.limit
    reason = jnp.where(stopped, STOP, jnp.where(full, LENGTH, RUNNING))
    return Acceptance(
        ids=ids,
        count=jnp.where(state.running, count, 0).astype(jnp.int32),
        drafted=jnp.where(state.running, jnp.minimum(drafted, count), 0).astype(jnp.int32),
        reason=jnp.where(state.running, reason, state.reason).astype(jnp.int32),
    )
