"""EAGLE-3: one decoder layer that drafts token after token, as a chain or as a tree.

The layer joins a token's row of the table with a hidden state of the token before it and predicts
the token after. Of decided tokens that state comes from three layers of the target, joined by `fc`;
of drafts it is the layer's own output. Its head may know a part of the vocabulary only (`d2t`).

Follows EAGLE `cnets.py` (Li et al., arXiv 2503.01840), with the variants of speculators 0.9.0
`models/eagle3`. Positions are plain token indices, image tokens counted one by one.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.base import (
    Anchor,
    Context,
    FitError,
    Heads,
    Proposal,
    chain_inputs,
)
from mmflash_jax.drafters.eagle3_config import Config, default_layer_ids
from mmflash_jax.drafters.eagle3_network import Model, weight_rules
from mmflash_jax.drafters.growth import Level, grow, most_nodes
from mmflash_jax.layers.cache import AttentionCache, empty_cache, write_cache
from mmflash_jax.layers.schema import Params, abstract_module, initialise
from mmflash_jax.layers.scores import Scores
from mmflash_jax.layers.tree import BlockRows, along
from mmflash_jax.weights import Rule, WeightsError
from mmflash_jax.weights.hf_config import ConfigError
from pallas_kernels import Kernels

DRAFT_TOKENS = 3
"""Where neither the checkpoint nor the user says how many: what servers' recipes draft."""
TREE_TOKENS, DEPTH = 15, 5
"""Of a tree, where the user does not say: with the anchor as many nodes as a block of DFlash."""


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Eagle3State:
    """What the draft knows of each row.

    cache: keys and values; slot p holds the pair of token p and the hidden state before it. Token 0
        has none, so slot 0 is never read.
    hidden: `[B, D]`, what `fc` makes of the last absorbed token's features.
    """

    cache: AttentionCache
    hidden: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """Rows to train over: cache as in `Eagle3State`, and what `fc` makes of every token's features,
    `[B, S, D]`."""

    cache: AttentionCache
    hidden: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Drafted:
    """The nodes of one proposal as far as they are run, U in all, W of them in the last level.

    rows: their keys and values, and the context.
    hidden: `[B, W, D]`, what the children of the last level are paired with.
    parents: int32 `[B, U]`, by the order in which nodes are run.
    """

    rows: BlockRows
    hidden: Array
    parents: Array


@runtime_checkable
class _FitsDraft(Protocol):
    """The fields of a target's config that a draft must agree with."""

    hidden_size: int
    vocab_size: int

    @property
    def num_hidden_layers(self) -> int: ...


@dataclass(frozen=True)
class Eagle3:
    """The plan of an EAGLE-3 draft; see `drafters.base.Drafter`.

    draft_tokens: nodes that are verified besides the anchor.
    top_k: 1 drafts a chain; more, a tree of which each level runs so many nodes.
    depth: levels of the tree; a chain has as many as tokens.
    """

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"
    draft_tokens: int = DRAFT_TOKENS
    top_k: int = 1
    depth: int = DEPTH

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype: str, kernels: Kernels = "reference"
    ) -> "Eagle3":
        read = Config.from_hf(config)
        return cls(read, dtype, kernels, read.draft_tokens or DRAFT_TOKENS)

    def __post_init__(self) -> None:
        """Refuse a tree that cannot be grown.

        Raises:
            ConfigError: naming the fields, their values and the range.
        """
        if self.top_k == 1:
            return
        if self.top_k > self.config.draft_vocab_size:
            raise ConfigError(
                f"draft_top_k is {self.top_k}, but the draft knows no more than "
                f"{self.config.draft_vocab_size} tokens"
            )
        most = most_nodes(self.top_k, self.depth)
        if self.draft_tokens > most:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens}, but a tree of draft_top_k {self.top_k} and "
                f"draft_depth {self.depth} has at most {most}"
            )

    @property
    def block(self) -> int:
        return self.draft_tokens + 1

    @property
    def capture(self) -> tuple[int, ...]:
        if self.config.target_layer_ids is None:
            raise ConfigError("the draft names no layers of the target; see `Eagle3.for_target`")
        return self.config.target_layer_ids

    @property
    def ignored(self) -> tuple[str, ...]:
        """Frozen copies of the target's own tensors, buffers, and maps of a full vocabulary."""
        full = self.config.draft_vocab_size == self.config.vocab_size
        copies = (r"embed_tokens\.weight$", r"verifier_(norm|lm_head)\.weight$")
        return (*copies, r".*\.inv_freq$", *((r"(d2t|t2d)$",) if full else ()))

    def for_target(self, target: _FitsDraft) -> "Eagle3":
        """The same draft with its layers named.

        Raises:
            ConfigError: the config names none, and the default fits no target this shallow.
        """
        if self.config.target_layer_ids is not None:
            return self
        ids = default_layer_ids(target.num_hidden_layers)
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, target_layer_ids=ids)
        )

    def shaped(self, *, tokens: int | None, top_k: int | None, depth: int | None) -> "Eagle3":
        """The same draft with what the user says of its chain or tree.

        Raises:
            ConfigError: the numbers do not make one.
        """
        if depth is not None and (top_k or 1) == 1:
            raise ConfigError(
                f"draft_depth is {depth}, but a chain is as deep as it is long; leave it out, or "
                "give draft_top_k for a tree"
            )
        changes = {"top_k": top_k, "depth": depth, "draft_tokens": tokens}
        if top_k is not None and top_k > 1 and tokens is None:
            changes["draft_tokens"] = min(TREE_TOKENS, most_nodes(top_k, depth or self.depth))
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)

    def check_fit(self, target: _FitsDraft) -> None:
        """Refuse a target that this draft was not made for.

        Raises:
            FitError: one message, each field with both values.
        """
        c, layers = self.config, target.num_hidden_layers
        pairs = {
            "target_hidden_size": (c.target_hidden_size, target.hidden_size),
            "hidden_size of the token table": (c.hidden_size, target.hidden_size),
            "vocab_size": (c.vocab_size, target.vocab_size),
        }
        problems = [
            f"{name}: draft {own}, target {other}"
            for name, (own, other) in pairs.items()
            if own != other
        ]
        outside = [i for i in c.target_layer_ids or () if i >= layers]
        if outside:
            problems.append(
                f"eagle_aux_hidden_state_layer_ids: draft reads the outputs of layers {outside}, "
                f"target has layers 0..{layers - 1}"
            )
        if problems:
            raise FitError("draft and target do not fit: " + "; ".join(problems))

    def abstract_params(self) -> Params:
        return _structure(self.config, self.dtype)[1]

    def init_params(self, seed: int) -> Params:
        """Fresh parameters for training."""
        dtype = jnp.dtype(self.dtype)
        return initialise(lambda rngs: Model(self.config, dtype=dtype, rngs=rngs), seed)

    def model(self, params: Params) -> Model:
        """The module over `params`; call inside `jax.jit`."""
        return nnx.merge(_structure(self.config, self.dtype)[0], params)

    def check_params(self, params: Params) -> None:
        """Refuse maps between the vocabularies that contradict each other or the sizes.

        Raises:
            WeightsError: naming the tensors and what is wrong with them.
        """
        c = self.config
        if c.draft_vocab_size == c.vocab_size:
            return
        ids = np.arange(c.draft_vocab_size) + np.asarray(params["d2t"])
        known = np.zeros(c.vocab_size, bool)
        known[ids[(ids >= 0) & (ids < c.vocab_size)]] = True
        if known.sum() != c.draft_vocab_size:
            raise WeightsError(
                f"d2t maps {c.draft_vocab_size} draft tokens to {known.sum()} different tokens of "
                f"the target's {c.vocab_size}; each entry must be the target's id minus the draft's"
            )
        if (np.asarray(params["t2d"]) != known).any():
            raise WeightsError(
                "t2d and d2t contradict each other: t2d must be true for exactly the tokens that "
                "d2t names"
            )

    def init_state(self, batch: int, capacity: int) -> Eagle3State:
        c, dtype = self.config, jnp.dtype(self.dtype)
        return Eagle3State(
            cache=empty_cache(batch, c.num_key_value_heads, capacity, c.head_dim, dtype),
            hidden=jnp.zeros((batch, c.hidden_size), dtype),
        )

    def absorb(self, params: Params, state: Eagle3State, context: Context) -> Eagle3State:
        length, count = context.length, context.count
        fused, k, v = _context(
            self.model(params), state.hidden, context.features, context.rows, length
        )
        last = jnp.maximum(count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(fused, last, axis=1)[:, 0]
        return Eagle3State(
            cache=write_cache(state.cache, k, v, length, count),
            hidden=jnp.where(count[:, None] > 0, last, state.hidden),
        )

    def propose(self, params: Params, state: Eagle3State, anchor: Anchor, heads: Heads) -> Proposal:
        model = self.model(params)
        c, batch = self.config, len(anchor.ids)
        none = jnp.zeros((batch, 0, c.num_key_value_heads, c.head_dim), state.hidden.dtype)
        start = Drafted(
            rows=BlockRows(cache=state.cache, k=none, v=none),
            hidden=state.hidden[:, None],
            parents=jnp.zeros((batch, 0), jnp.int32),
        )
        run = functools.partial(self._run, model, anchor.length, heads)
        if self.top_k == 1:
            ids = [anchor.ids[:, None]]
            for number in range(self.draft_tokens):
                level = Level(number=number, ids=ids[-1], above=jnp.zeros_like(ids[-1]))
                logits, start = run(start, level)
                ids.append(heads.pick(Scores.of(logits), number))
            return Proposal(ids=jnp.concatenate(ids[1:], axis=1))

        def likelihood(drafted: Drafted, level: Level) -> tuple[Float[Array, "B W V"], Drafted]:
            logits, drafted = run(drafted, level)
            return heads.rank(logits, level.number), drafted

        ids, parents = grow(
            likelihood, start, anchor.ids, nodes=self.draft_tokens, top_k=self.top_k,
            depth=min(self.depth, self.draft_tokens),
        )  # fmt: skip
        return Proposal(ids=ids, parents=parents)

    def _run(
        self, model: Model, length: Int[Array, " B"], heads: Heads, drafted: Drafted, level: Level
    ) -> tuple[Float[Array, "B W V"], Drafted]:
        """Draft logits after each node of the next level, and all that is run then."""
        width = drafted.hidden.shape[1]
        # Nodes are numbered as they are run; the level before is the last `width` of them.
        first = max(drafted.parents.shape[1] - width, 0)
        parents = jnp.concatenate([drafted.parents, first + level.above], axis=1)
        position = jnp.broadcast_to(length[:, None] + level.number, level.ids.shape)
        out, rows = model.layer(
            heads.embed(level.ids), along(level.above, drafted.hidden), position, drafted.rows,
            length, parents, self.kernels,
        )  # fmt: skip
        after = Drafted(rows=rows, hidden=model.fed_back(out), parents=parents)
        return model.logits(out), after

    def context_state(
        self,
        params: Params,
        features: Float[Array, "B S features"],
        rows: Float[Array, "B S D"] | None,
        *_: object,
    ) -> WholeRows:
        """What chains of whole rows are trained over: keys and values made of the target's features
        at every token.

        Raises:
            ValueError: rows are missing.
        """
        if rows is None:
            raise ValueError("an EAGLE-3 draft is trained on table rows too")
        batch = len(features)
        nothing = self.init_state(batch, 0).hidden
        start = jnp.zeros((batch,), jnp.int32)
        fused, k, v = _context(self.model(params), nothing, features, rows, start)
        return WholeRows(cache=AttentionCache(k=k.swapaxes(1, 2), v=v.swapaxes(1, 2)), hidden=fused)

    def block_inputs(
        self, anchor: Int[Array, "B A"], labels: Int[Array, "B A drafts"]
    ) -> Int[Array, "B A drafts"]:
        return chain_inputs(anchor, labels)

    def block_logits(
        self,
        params: Params,
        heads: Heads,
        state: WholeRows,
        ids: Int[Array, "B A drafts"],
        anchors: Int[Array, "B A"],
        first: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A drafts V"]:
        """fp32 logits of chains after `anchors`: the training-time test of EAGLE-3.

        They are proposed as served, but with the right tokens in place of those it would pick.

        Raises:
            ValueError: rows are packed.
        """
        if first is not None:
            raise ValueError("packed rows are not supported for an EAGLE-3 draft")
        before = jnp.maximum(anchors - 1, 0)
        last = jnp.take_along_axis(state.hidden, before[..., None], axis=1)

        def chain(ids: Array, hidden: Array, length: Array) -> Array:
            made: list[Array] = []

            def right(scored: Scores, number: int) -> Array:
                made.append(scored.make())
                return ids[:, number + 1 : number + 2]

            self.propose(
                params,
                Eagle3State(cache=state.cache, hidden=hidden),
                Anchor(ids=ids[:, 0], length=length, positions=length[None]),
                dataclasses.replace(heads, pick=right),
            )
            return jnp.concatenate(made, axis=1)

        return jax.vmap(chain, in_axes=1, out_axes=1)(ids, last, anchors)

    @property
    def score_rows(self) -> int:
        """Query rows of a chain whose scores exist at once, heads counted."""
        return self.config.num_attention_heads * self.draft_tokens

    def weight_rules(self) -> list[Rule]:
        return weight_rules(self.config)


def _context(
    model: Model,
    hidden: Float[Array, "B D"],
    features: Float[Array, "B T features"],
    rows: Float[Array, "B T D"],
    start: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Joined features of decided tokens at `start ..`, and keys and values of each one's row with
    the hidden state before it; `hidden` is that of the first."""
    fused = model.fuse(features)
    before = jnp.concatenate([hidden[:, None], fused[:, :-1]], axis=1)
    position = start[:, None] + jnp.arange(fused.shape[1])
    return fused, *model.layer.context(rows, before, position)


@functools.cache
def _structure(config: Config, dtype: str) -> tuple[Any, Params]:
    return abstract_module(lambda rngs: Model(config, dtype=jnp.dtype(dtype), rngs=rngs))
