"""What every drafter offers: the seam between a draft method and the decoding loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.cache import CachedKeys
from mmflash_jax.layers.schema import Params
from mmflash_jax.layers.scores import Scores

DraftState = Any


class FitError(ValueError):
    """A draft and a target do not belong together; the message lists every field at fault."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Context:
    """Decided tokens that the target has run, as a draft takes them in.

    features: `[B, T, captured * D]`, what `capture` asks for.
    rows: `[B, T, D]` of the token table, media features in place, as `Target.embed_raw` gives them.
    positions: int32 `[A, B, T]`, the target's rotary positions.
    length: int32 `[B]`, index of the first of these tokens.
    count: int32 `[B]`, how many of the T are real.

    What a draft does not read is not computed: all of this is made inside `jax.jit`.
    """

    features: Float[Array, "B T features"]
    rows: Float[Array, "B T D"]
    positions: Int[Array, "A B T"]
    length: Int[Array, " B"]
    count: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Anchor:
    """The last known token of each row: decided, but in no cache yet.

    ids: int32 `[B]`.
    length: int32 `[B]`, its index; all tokens before it have been absorbed.
    positions: int32 `[A, B]`, its rotary position in the target. A later token's is that much
        further on as its index.
    """

    ids: Int[Array, " B"]
    length: Int[Array, " B"]
    positions: Int[Array, "A B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What comes after the anchor, as the draft has it.

    ids: int32 `[B, block - 1]`, for the positions after the anchor, or of the nodes of a tree.
    parents: None for a chain; int32 `[B, block]` for a tree (`pallas_kernels.tree`): node 0 is the
        anchor, node i drafts `ids[:, i - 1]` as the token after its parent.
    """

    ids: Array
    parents: Array | None = None


def most_likely(scored: Scores, first: int | Array = 0) -> Array:
    """The id of the largest logit at each place, the lowest among equals."""
    del first
    return scored.likeliest()


def made_at_once(hidden: Array, logits: Callable[[], Array]) -> Scores:
    """Scores whose logits are made whoever reads them."""
    del hidden
    return Scores.of(logits())


def log_likelihood(logits: Array, first: int | Array = 0) -> Array:
    """Log-probabilities `[..., V]` of `logits`."""
    del first
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def _no_cache(kind: str) -> CachedKeys:
    raise ValueError(f"keys and values of {kind} are asked for where no target has a cache")


@dataclass(frozen=True)
class Heads:
    """What a draft borrows of the target: its token table, output head, way of choosing, and cache.

    embed: ids `[B, T]` -> unscaled rows `[B, T, D]`.
    logits: hidden `[..., D]` -> fp32 logits `[..., V]` without soft cap.
    scores: hidden `[B, T, D]` and what makes its draft logits, which must be an increasing function
        of what `logits` gives -> their `Scores`.
    pick: `Scores` of the drafts from number `first` on (0: the one right after the anchor) -> ids,
        by the rule that the target's tokens are chosen by.
    rank: draft logits `[B, T, V]`, all of them for draft number `first` -> fp32 log-likelihood
        `[B, T, V]` that each id is the target's choice there.
    keys_values: what the last layer of a kind ("full_attention", "sliding_attention") reads of the
        tokens before the anchor (`Target.keys_values`).
    """

    embed: Callable[[Array], Array]
    logits: Callable[[Array], Array]
    scores: Callable[[Array, Callable[[], Array]], Scores] = made_at_once
    pick: Callable[..., Array] = most_likely
    rank: Callable[..., Array] = log_likelihood
    keys_values: Callable[[str], CachedKeys] = _no_cache


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens after the anchor, from the target's features of what came before."""

    @property
    def block(self) -> int:
        """Tokens of a block: the anchor and the drafts."""
        ...

    @property
    def capture(self) -> tuple[int, ...]:
        """Target layers whose raw outputs the drafter reads, 0-based, in order; `AFTER_NORM`
        (layers/capture.py) stands for the hidden state after the final norm."""
        ...

    def init_state(self, batch: int, capacity: int) -> DraftState:
        """State of rows that have absorbed nothing."""
        ...

    def absorb(self, params: Params, state: DraftState, context: Context) -> DraftState:
        """Take in the first `count` tokens from index `length` on, which follow those before."""
        ...

    def propose(self, params: Params, state: DraftState, anchor: Anchor, heads: Heads) -> Proposal:
        """Draft the tokens after the anchor; the state does not change."""
        ...


def chain_inputs(
    anchor: Int[Array, "B A"], labels: Int[Array, "B A drafts"]
) -> Int[Array, "B A drafts"]:
    """What chains are trained from: the anchor of each and the right tokens, but the last."""
    return jnp.concatenate([anchor[..., None], labels[..., :-1]], axis=-1)


@runtime_checkable
class Chain(Drafter, Protocol):
    """A drafter that drafts token after token, so that fewer cost less. A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def draft_tokens(self) -> int: ...
