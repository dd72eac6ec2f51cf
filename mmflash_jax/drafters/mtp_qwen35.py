"""Qwen3.5's own multi-token-prediction head: one more layer that drafts token after token.

The head joins a token's row of the table with the hidden state of the token before it and predicts
the token after. Fed with its own output in place of the target's, it goes on. Its weights stand
beside the target's under `mtp.`; table and output head are the target's.

Follows vLLM 0.33 `models/qwen3_5_mtp.py` and SGLang 0.5.23 `models/qwen3_5_mtp.py`: the row comes
first in the joined vector, the hidden state is the one after the final norm, and the position is
that of the hidden state, also where an image makes positions jump.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.base import (
    Anchor,
    Context,
    FitError,
    Heads,
    Proposal,
    chain_inputs,
)
from mmflash_jax.drafters.mtp_qwen35_config import Config
from mmflash_jax.drafters.mtp_qwen35_network import Model
from mmflash_jax.layers.cache import AttentionCache, empty_cache
from mmflash_jax.layers.capture import AFTER_NORM
from mmflash_jax.layers.schema import Params, abstract_module, initialise
from mmflash_jax.layers.scores import Scores
from mmflash_jax.weights import TRANSPOSE, Rule, attention_projections, mlp_projections
from pallas_kernels import Kernels


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MTPState:
    """What the head knows of each row.

    cache: keys and values; slot p joins token p + 1 with the hidden state of token p, so the last
        absorbed token has none yet.
    hidden: `[B, D]`, the target's hidden state of the last absorbed token.
    positions: int32 `[A, B]`, its rotary position.
    """

    cache: AttentionCache
    hidden: Array
    positions: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """Rows to train over: cache as in `MTPState`, the target's hidden state `[B, S, D]` and rotary
    position `[A, B, S]` of every token."""

    cache: AttentionCache
    hidden: Array
    positions: Array


@runtime_checkable
class _FitsHead(Protocol):
    """The fields of a target's config that the head must agree with."""

    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class Qwen35MTP:
    """The plan of an MTP head that drafts `draft_tokens` tokens; see `drafters.base.Drafter`."""

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"
    draft_tokens: int = 3

    ignored: ClassVar[tuple[str, ...]] = (r"(?!mtp\.)",)
    """Everything in the folder that is the target's."""

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype: str, kernels: Kernels = "reference"
    ) -> "Qwen35MTP":
        return cls(Config.from_hf(config), dtype, kernels)

    @property
    def block(self) -> int:
        return self.draft_tokens + 1

    @property
    def capture(self) -> tuple[int, ...]:
        return (AFTER_NORM,)

    def check_fit(self, target: _FitsHead) -> None:
        """Refuse a target that this head was not made for.

        Raises:
            FitError: one message, each field with both values.
        """
        problems = [
            f"{name}: draft {getattr(self.config, name)}, target {getattr(target, name, None)}"
            for name in ("hidden_size", "vocab_size", "mrope_section")
            if getattr(self.config, name) != getattr(target, name, None)
        ]
        if problems:
            raise FitError("MTP head and target do not fit: " + "; ".join(problems))

    def abstract_params(self) -> Params:
        return _structure(self.config, self.dtype)[1]

    def init_params(self, seed: int) -> Params:
        """Fresh parameters for training."""
        dtype = jnp.dtype(self.dtype)
        return initialise(lambda rngs: Model(self.config, dtype=dtype, rngs=rngs), seed)

    def model(self, params: Params) -> Model:
        """The module over `params`; call inside `jax.jit`."""
        return nnx.merge(_structure(self.config, self.dtype)[0], params)

    def init_state(self, batch: int, capacity: int) -> MTPState:
        c, dtype = self.config, jnp.dtype(self.dtype)
        return MTPState(
            cache=empty_cache(batch, c.num_key_value_heads, capacity, c.head_dim, dtype),
            hidden=jnp.zeros((batch, c.hidden_size), dtype),
            positions=jnp.zeros((3, batch), jnp.int32),
        )

    def absorb(self, params: Params, state: MTPState, context: Context) -> MTPState:
        """Redo with the target's hidden states what was drafted on the head's own."""
        width = context.rows.shape[1]
        hidden = jnp.concatenate([state.hidden[:, None], context.features], axis=1)
        positions = jnp.concatenate([state.positions[..., None], context.positions], axis=-1)
        # Before the first token of all there is no hidden state: its row joins nothing.
        skip = (context.length == 0).astype(jnp.int32)
        place = skip[:, None] + jnp.arange(width)
        row = jnp.minimum(place, width - 1)
        _, cache = self.model(params)(
            jnp.take_along_axis(context.rows, row[..., None], axis=1),
            jnp.take_along_axis(hidden, place[..., None], axis=1),
            jnp.take_along_axis(positions, place[None], axis=2),
            state.cache,
            jnp.maximum(context.length - 1, 0),
            jnp.maximum(context.count - skip, 0),
            self.kernels,
        )
        last = context.count[:, None]
        return MTPState(
            cache=cache,
            hidden=jnp.take_along_axis(hidden, last[..., None], axis=1)[:, 0],
            positions=jnp.take_along_axis(positions, last[None], axis=2)[..., 0],
        )

    def propose(self, params: Params, state: MTPState, anchor: Anchor, heads: Heads) -> Proposal:
        """Draft a chain. Each step runs all of it as one causal block, so the cache stays as it is:
        the rows cost next to nothing beside the weights, a copy of the cache would not."""
        count, model = self.draft_tokens, self.model(params)
        length = jnp.maximum(anchor.length - 1, 0)
        later = anchor.positions[..., None] + jnp.arange(count - 1)
        positions = jnp.concatenate([state.positions[..., None], later], axis=-1)
        chain = jnp.zeros((*anchor.ids.shape, count, self.config.hidden_size), state.hidden.dtype)

        def draft(step: int | Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            rows, hidden, ids = carry
            out, _ = model(
                rows, hidden, positions, state.cache, length, jnp.zeros_like(length), self.kernels
            )
            out = lax.dynamic_index_in_dim(out, step, axis=1)
            chosen = heads.pick(Scores.of(heads.logits(out)), step)
            return (
                rows.at[:, step + 1].set(_first(heads.embed(chosen), rows), mode="drop"),
                hidden.at[:, step + 1].set(_first(out, hidden), mode="drop"),
                ids.at[:, step].set(chosen[:, 0]),
            )

        start = (
            chain.at[:, 0].set(_first(heads.embed(anchor.ids[:, None]), chain)),
            chain.at[:, 0].set(state.hidden),
            jnp.zeros((*anchor.ids.shape, count), jnp.int32),
        )
        return Proposal(ids=lax.fori_loop(0, count, draft, start)[2])

    def context_state(
        self,
        params: Params,
        features: Float[Array, "B S D"],
        rows: Float[Array, "B S D"] | None,
        positions: Int[Array, "3 B S"] | None,
    ) -> WholeRows:
        """What blocks of whole rows are trained over: keys and values made of the target's hidden
        states at every token but the last.

        Raises:
            ValueError: rows or positions are missing.
        """
        if rows is None or positions is None:
            raise ValueError("an MTP head is trained on table rows and rotary positions too")
        batch, width = features.shape[:2]
        empty = self.init_state(batch, width).cache
        zero = jnp.zeros((batch,), jnp.int32)
        later, dtype = jnp.roll(rows, -1, axis=1), jnp.dtype(self.dtype)
        _, cache = self.model(params)(
            later.astype(dtype), features.astype(dtype), positions, empty, zero, zero + width
        )
        return WholeRows(cache=cache, hidden=features, positions=positions)

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
        """fp32 logits of chains after `anchors`, each step on the hidden state of the one before,
        as `propose` makes them where it drafts the right tokens.

        Raises:
            ValueError: rows are packed.
        """
        if first is not None:
            raise ValueError("packed rows are not supported for an MTP head")
        model, (B, A, count) = self.model(params), ids.shape
        rows = heads.embed(ids.reshape(B, A * count)).reshape(B, A, count, -1)
        place = jnp.maximum(anchors[..., None] - 1 + jnp.arange(count), 0)
        place = jnp.minimum(place, state.hidden.shape[1] - 1).reshape(B, -1)
        positions = jnp.take_along_axis(state.positions, place[None], axis=2)
        positions = positions.reshape(-1, B, A, count)
        before = jnp.maximum(anchors - 1, 0)
        last = jnp.take_along_axis(state.hidden, before[..., None], axis=1)

        def run(rows: Array, hidden: Array, positions: Array, length: Array) -> Array:
            none = jnp.zeros_like(length)
            return model(rows, hidden, positions, state.cache, length, none)[0]

        chains = jax.vmap(run, in_axes=(1, 1, 2, 1), out_axes=1)
        hidden, made = last[:, :, None].astype(rows.dtype), []
        for step in range(1, count + 1):
            out = chains(rows[:, :, :step], hidden, positions[..., :step], before)[:, :, -1:]
            hidden = jnp.concatenate([hidden, out.astype(hidden.dtype)], axis=2)
            made.append(out)
        return heads.logits(jnp.concatenate(made, axis=2))

    @property
    def score_rows(self) -> int:
        """Query rows of a chain whose scores exist at once, heads counted."""
        return self.config.num_attention_heads * sum(range(1, self.block))

    def weight_rules(self) -> list[Rule]:
        norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
        rules = [Rule(f"mtp.{name}.weight", (name, "weight")) for name in norms]
        rules.append(Rule("mtp.fc.weight", ("fc", "kernel"), TRANSPOSE))
        c, at, path = self.config, "mtp.layers.0.", ("layers", 0)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        rules += attention_projections(f"{at}self_attn.", (*path, "self_attn"), 2 * queries, keys)
        rules += mlp_projections(f"{at}mlp.", (*path, "mlp"), c.intermediate_size)
        plain = ["input_layernorm", "post_attention_layernorm"]
        for name in [*plain, "self_attn.q_norm", "self_attn.k_norm"]:
            path = ("layers", 0, *name.split("."), "weight")
            rules.append(Rule(f"mtp.layers.0.{name}.weight", path))
        return rules


def _first(made: Float[Array, "B 1 D"], like: Array) -> Float[Array, "B D"]:
    return made[:, 0].astype(like.dtype)


@functools.cache
def _structure(config: Config, dtype: str) -> tuple[Any, Params]:
    return abstract_module(lambda rngs: Model(config, dtype=jnp.dtype(dtype), rngs=rngs))
