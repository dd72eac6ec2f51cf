"""Which drafted tokens stay. The only place with acceptance mathematics.

A draft stays while it equals the target's own choice given all before it. The choice is the most
likely token or a keyed sample (decode/sampling.py); either way the ids are those of plain decoding.
In a tree "before" means above: a sample is a function of its place, which siblings share.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from mmflash_jax.decode.records import LENGTH, RUNNING, STOP, Acceptance, DecodeState, Verification
from mmflash_jax.decode.sampling import choose
from mmflash_jax.drafters import Proposal
from pallas_kernels import ancestors_of, depths_of

Agrees = Callable[[Array, Array], Array]


def accept(
    state: DecodeState,
    proposal: Proposal,
    verification: Verification,
    stop_ids: tuple[int, ...],
    agrees: Agrees = jnp.equal,
) -> Acceptance:
    """Keep the longest prefix of drafts that the target agrees with, and its next token.

    Of a tree it keeps the longest branch. `agrees` says of drafts and the target's choices which
    are the same; only measurements pass another one.
    """
    if proposal.parents is not None:
        return _accept_branch(state, proposal.ids, proposal.parents, verification, stop_ids, agrees)
    place = state.num_tokens[:, None] + jnp.arange(1 + proposal.ids.shape[1])
    choice = choose(
        verification.scores, state.sampling, place, state.adjustments, drafted=proposal.ids
    )
    agree = agrees(proposal.ids, choice[:, :-1])
    accepted = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=-1), axis=-1)
    # Row `accepted` of `choice` is the bonus token, earlier rows equal the accepted drafts.
    return cut(state, choice, accepted + 1, stop_ids)


def _accept_branch(
    state: DecodeState,
    drafted: Int[Array, "B drafts"],
    parents: Int[Array, "B block"],
    verification: Verification,
    stop_ids: tuple[int, ...],
    agrees: Agrees,
) -> Acceptance:
    """The longest branch of a tree on which every node is the target's choice after its parent.

    All such branches hold the same ids, since the choice after a node is one token: the longest is
    the answer of plain decoding as far as the tree reaches.
    """
    ancestors = ancestors_of(parents)
    depth = depths_of(ancestors)
    choice = choose(
        verification.scores, state.sampling, state.num_tokens[:, None] + depth, state.adjustments,
        drafted=drafted, before=ancestors[:, :, 1:],
    )  # fmt: skip
    agree = agrees(drafted, jnp.take_along_axis(choice, parents[:, 1:], axis=1))
    agree = jnp.pad(agree, ((0, 0), (1, 0)), constant_values=True)
    agreed = ~jnp.any(ancestors & ~agree[:, None], axis=-1)
    tip = jnp.argmax(jnp.where(agreed, depth, -1), axis=-1)[:, None]
    branch = jnp.take_along_axis(ancestors, tip[..., None], axis=1)[:, 0]
    # Nodes are in topological order: those of the branch come first, from the anchor down.
    path = jnp.argsort(~branch, axis=-1, stable=True).astype(jnp.int32)
    count = jnp.take_along_axis(depth, tip, axis=1)[:, 0] + 1
    decided = cut(state, jnp.take_along_axis(choice, path, axis=1), count, stop_ids)
    return dataclasses.replace(decided, path=path)


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
