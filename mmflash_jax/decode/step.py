"""One decoding step: propose -> verify -> accept -> commit (docs/decoding.md).

Plain decoding is this step with the drafter that proposes nothing, so "drafted ids equal plain
ids" can be tested on the step itself.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mmflash_jax.decode.accept import accept
from mmflash_jax.decode.adjust import count_tokens
from mmflash_jax.decode.logprobs import note
from mmflash_jax.decode.records import Acceptance, DecodeState, Plan, Verification
from mmflash_jax.decode.sampling import choose, rank
from mmflash_jax.drafters import Anchor, Context, Heads, Proposal
from mmflash_jax.layers.schema import Params
from mmflash_jax.layers.scores import Scores
from mmflash_jax.layers.tree import along
from pallas_kernels import ancestors_of, depths_of, likeliest, product
from pallas_kernels.likeliest import pays


def borrow_heads(plan: Plan, params: Params) -> Heads:
    """The target's table and head as functions, for the drafter."""
    return Heads(
        embed=functools.partial(plan.target.embed_raw, params["target"]),
        logits=lambda hidden: product.logits(hidden, plan.target.head(params["target"])),
    )


def _scores(plan: Plan, params: Params, hidden: Array, logits: Callable[[], Array]) -> Scores:
    """Of hidden states whose `logits` are an increasing function of their products with the head.

    Where a kernel finds the largest product, logits are left to whoever asks for them.
    """
    target = plan.target
    table = target.head(params["target"])
    if not pays(math.prod(hidden.shape[:-1]), table, target.kernels):
        return Scores.of(logits())
    find = functools.partial(
        likeliest, hidden, table, vocabulary=plan.vocabulary, kernels=target.kernels
    )
    return Scores(hidden.shape[1], logits, find)


def _pick(plan: Plan, state: DecodeState, scored: Scores, first: int | Array = 0) -> Array:
    """A draft's ids for the next places of each answer, by the rule that the target's follow."""
    place = state.num_tokens[:, None] + first + jnp.arange(scored.places)
    return choose(scored.map(plan.tokens_only), state.sampling, place, state.adjustments)


def _rank(plan: Plan, state: DecodeState, logits: Array, first: int | Array = 0) -> Array:
    """A draft's log-likelihoods of the ids for draft number `first`, by the same rule."""
    place = jnp.broadcast_to(state.num_tokens[:, None] + first, logits.shape[:2])
    return rank(plan.tokens_only(logits), state.sampling, place, state.adjustments)


def _positions(plan: Plan, state: DecodeState, after: Int[Array, "*#B T"]) -> Int[Array, "A B T"]:
    """Rotary positions of tokens that stand `after` the anchor by so much."""
    index = state.length[:, None] + after
    return jnp.broadcast_to(
        index + state.rope_shift[:, None], (plan.target.position_axes, *index.shape)
    )


def step(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    """Advance every running row by 1 .. block tokens."""
    with jax.named_scope("propose"):
        proposal = propose(plan, params, state)
    with jax.named_scope("verify"):
        verification = verify(plan, params, state, proposal)
    with jax.named_scope("accept"):
        rule = plan.rule or accept
        acceptance = rule(state, proposal, verification, plan.stop_ids)
    with jax.named_scope("commit"):
        return commit(plan, params, state, verification, acceptance)


def propose(plan: Plan, params: Params, state: DecodeState) -> Proposal:
    """The draft's ids for the tokens after each anchor."""
    heads = dataclasses.replace(
        borrow_heads(plan, params),
        scores=functools.partial(_scores, plan, params),
        pick=functools.partial(_pick, plan, state),
        rank=functools.partial(_rank, plan, state),
        keys_values=functools.partial(plan.target.keys_values, state.cache),
    )
    positions = _positions(plan, state, jnp.zeros((1,), jnp.int32))
    anchor = Anchor(ids=state.anchor, length=state.length, positions=positions[..., 0])
    return plan.drafter.propose(params["drafter"], state.draft, anchor, heads)


def verify(plan: Plan, params: Params, state: DecodeState, proposal: Proposal) -> Verification:
    """One target pass over the anchor and its drafts, a chain or a tree."""
    target, parents = plan.target, proposal.parents
    ids = jnp.concatenate([state.anchor[:, None], proposal.ids], axis=1)
    after = jnp.arange(ids.shape[1]) if parents is None else depths_of(ancestors_of(parents))
    out = target.forward(
        params["target"],
        target.embed(params["target"], ids),
        _positions(plan, state, after),
        state.cache,
        state.length,
        jnp.where(state.running, ids.shape[1], 0),
        capture=plan.drafter.capture,
        parents=parents,
    )
    scores = _scores(plan, params, out.hidden, lambda: target.logits(params["target"], out.hidden))
    scores = scores.map(plan.tokens_only)
    return Verification(scores=scores, features=out.features, cache=out.cache)


def commit(
    plan: Plan,
    params: Params,
    state: DecodeState,
    verification: Verification,
    acceptance: Acceptance,
) -> DecodeState:
    """The next state: the block's first `count` tokens enter the caches, the last new one waits.

    Of `count` new tokens the anchor and all but the last were in the block, so exactly `count`
    block rows stay: the first ones, or those of the accepted path through a tree.
    """
    count, path = acceptance.count, acceptance.path
    features, logits = verification.features, verification.scores.make
    if path is not None:
        features, logits = along(path, features), lambda: along(path, verification.scores.make())
    rows = jnp.arange(count.shape[0])[:, None]
    place = jnp.arange(acceptance.ids.shape[1])
    slot = jnp.where(
        place < count[:, None], state.num_tokens[:, None] + place, state.tokens.shape[1]
    )
    last = jnp.take_along_axis(acceptance.ids, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    kept = jnp.concatenate([state.anchor[:, None], acceptance.ids[:, :-1]], axis=1)
    context = Context(
        features=features,
        rows=plan.target.embed_raw(params["target"], kept),
        positions=_positions(plan, state, place),
        length=state.length,
        count=count,
    )
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, slot].set(acceptance.ids, mode="drop"),
        num_tokens=state.num_tokens + count,
        anchor=jnp.where(count > 0, last, state.anchor),
        length=state.length + count,
        reason=acceptance.reason,
        steps=state.steps + state.running,
        committed=state.committed + (jnp.arange(state.committed.shape[1]) == count[:, None] - 1),
        drafted=state.drafted.at[rows, slot].set(place < acceptance.drafted[:, None], mode="drop"),
        cache=plan.target.commit(verification.cache, count, path),
        draft=plan.drafter.absorb(params["drafter"], state.draft, context),
        adjustments=count_tokens(state.adjustments, acceptance.ids, count),
        logprobs=note(state.logprobs, logits, acceptance.ids, slot),
    )
