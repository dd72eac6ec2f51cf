"""DFlash / MMFlash: a block of masked slots denoised in one forward pass.

The draft is a stack of Qwen3 layers without embedding or head. Every layer makes its own keys
and values from one projected context vector a token (the target's captured layers); only the
block makes queries. Follows z-lab `dflash` 0.1.0 `model.py` (Chen et al., arXiv 2602.06036).
MMFlash has the same shape and other training.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.base import (
    Anchor,
    Context,
    FitError,
    Heads,
    Proposal,
    made_at_once,
)
from mmflash_jax.drafters.dflash_config import Config
from mmflash_jax.drafters.dflash_network import DFlashState, Model
from mmflash_jax.layers.schema import Params, Path, abstract_module, initialise
from mmflash_jax.weights import TRANSPOSE, Rule, mlp_projections
from pallas_kernels import Kernels, Slots


@runtime_checkable
class _FitsDraft(Protocol):
    """The fields of a target's config that a draft must agree with."""

    hidden_size: int
    vocab_size: int

    @property
    def num_hidden_layers(self) -> int: ...


@dataclass(frozen=True)
class DFlash:
    """The plan of a DFlash draft; see `drafters.base.Drafter`."""

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"
    """Of drafting, and of attention in training: the other kernels have no gradients."""

    ignored: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype: str, kernels: Kernels = "reference"
    ) -> "DFlash":
        return cls(Config.from_hf(config), dtype, kernels)

    @property
    def block(self) -> int:
        return self.config.block_size

    @property
    def capture(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def check_fit(self, target: _FitsDraft) -> None:
        """Refuse a target that this draft was not made for.

        Raises:
            FitError: one message, each field with both values.
        """
        c, layers = self.config, target.num_hidden_layers
        problems = []
        if c.target_hidden_size != target.hidden_size:
            problems.append(
                f"hidden_size: draft {c.target_hidden_size}, target {target.hidden_size}"
            )
        if c.hidden_size != target.hidden_size:
            problems.append(
                f"hidden_size of the borrowed head: draft {c.hidden_size}, "
                f"target {target.hidden_size}"
            )
        if c.num_target_layers not in (None, layers):
            problems.append(f"num_target_layers: draft {c.num_target_layers}, target {layers}")
        outside = [i for i in c.target_layer_ids if not 0 <= i < layers]
        if outside:
            problems.append(f"target_layer_ids: draft {outside}, target has layers 0..{layers - 1}")
        if c.vocab_size != target.vocab_size:
            problems.append(f"vocab_size: draft {c.vocab_size}, target {target.vocab_size}")
        if not 0 <= c.mask_token_id < target.vocab_size:
            problems.append(
                f"mask_token_id: draft {c.mask_token_id}, target table has rows "
                f"0..{target.vocab_size - 1}"
            )
        if problems:
            raise FitError("draft and target do not fit: " + "; ".join(problems))

    def abstract_params(self) -> Params:
        return _structure(self)[1]

    def init_params(self, seed: int) -> Params:
        """Fresh parameters for training."""
        return initialise(self.build, seed)

    def model(self, params: Params) -> Model:
        """The module over `params`; call inside `jax.jit`."""
        return nnx.merge(_structure(self)[0], params)

    def build(self, rngs: nnx.Rngs) -> Model:
        """A fresh module."""
        return Model(self.config, dtype=jnp.dtype(self.dtype), rngs=rngs)

    def init_state(self, batch: int, capacity: int) -> DFlashState:
        c = self.config
        shape = (batch, c.num_key_value_heads, capacity, c.head_dim)

        def empty() -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, jnp.dtype(self.dtype)) for _ in c.layers)

        return DFlashState(k=empty(), v=empty())

    def context_state(
        self, params: Params, features: Float[Array, "B T features"], *_: object
    ) -> DFlashState:
        """State of rows whose whole context is `features`, position 0 first: for training."""
        start = jnp.zeros(features.shape[:1], jnp.int32)
        made = self.model(params).context(features, start, [None] * len(self.config.layers))
        return DFlashState(
            k=tuple(rows.k.swapaxes(1, 2) for rows in made),
            v=tuple(rows.v.swapaxes(1, 2) for rows in made),
        )

    def absorb(self, params: Params, state: DFlashState, context: Context) -> DFlashState:
        start, count = context.length, context.count
        slots = [
            Slots(k=k, v=v, start=start, count=count) for k, v in zip(state.k, state.v, strict=True)
        ]
        made = self.model(params).context(context.features, start, slots, self.kernels)
        return DFlashState(
            k=tuple(rows.k_cache for rows in made), v=tuple(rows.v_cache for rows in made)
        )

    def propose(self, params: Params, state: DFlashState, anchor: Anchor, heads: Heads) -> Proposal:
        ids = block_ids(anchor.ids[:, None], self.config)
        hidden = self.denoise(params, state, ids, anchor.length[:, None], heads)
        # The anchor's own row predicts nothing; row k predicts the token at its own position.
        hidden = hidden[:, 0, 1:]
        logits = functools.partial(self.logits, hidden, heads)
        # A factor below zero would turn the order of the head's products around.
        scores = heads.scores if self.config.output_multiplier > 0 else made_at_once
        return Proposal(ids=heads.pick(scores(hidden, logits)))

    def denoise(
        self,
        params: Params,
        state: DFlashState,
        ids: Int[Array, "B A T"],
        start: Int[Array, "B A"],
        heads: Heads,
        first: Int[Array, "B A"] | None = None,
        *,
        trained: bool = False,
    ) -> Float[Array, "B A T D"]:
        """Hidden states of blocks of ids; block `a` of a row stands at `start[:, a]`.

        `first[:, a]` is where the block's document begins in a packed row. Its positions need not
        restart there: the rotation turns queries and keys by plain token indices, so a score
        depends on their difference alone, and a shift of a whole document changes none. `trained`:
        all but attention takes the reference, which has gradients.
        """
        B, A, T = ids.shape
        x = heads.embed(ids.reshape(B, A * T)).reshape(B, A, T, -1)
        x = (x * self.config.input_embedding_scale).astype(jnp.dtype(self.dtype))
        others = "reference" if trained else self.kernels
        return self.model(params).denoise(x, state, start, first, others, self.kernels)

    def block_inputs(
        self, anchor: Int[Array, "B A"], labels: Int[Array, "B A drafts"]
    ) -> Int[Array, "B A block"]:
        """What a block is trained from: its anchor and masks."""
        del labels
        return block_ids(anchor, self.config)

    def block_logits(
        self,
        params: Params,
        heads: Heads,
        state: DFlashState,
        ids: Int[Array, "B A block"],
        anchors: Int[Array, "B A"],
        first: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A drafts V"]:
        """fp32 logits of the drafts of blocks over a row's context, by the serving code."""
        hidden = self.denoise(params, state, ids, anchors, heads, first, trained=True)
        return self.logits(hidden[:, :, 1:], heads)

    @property
    def score_rows(self) -> int:
        """Query rows of a block whose scores exist at once, heads and layers counted: none with the
        kernel, which keeps them to itself. With "auto" it may be the reference, so they count."""
        if self.kernels in ("gpu", "interpret"):
            return 0
        c = self.config
        return len(c.layers) * c.num_attention_heads * self.block

    def logits(self, hidden: Float[Array, "*batch D"], heads: Heads) -> Float[Array, "*batch V"]:
        """fp32 draft logits, multiplier and soft cap of the draft's config included."""
        logits = heads.logits(hidden) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def weight_rules(self) -> list[Rule]:
        rules = [
            Rule("fc.weight", ("fc", "kernel"), TRANSPOSE),
            Rule("hidden_norm.weight", ("hidden_norm", "weight")),
            Rule("norm.weight", ("norm", "weight")),
        ]
        for index in range(len(self.config.layers)):
            prefix, path = f"layers.{index}.", ("layers", index)
            rules += _layer_rules(prefix, path, bias=self.config.attention_bias)
            rules += mlp_projections(f"{prefix}mlp.", (*path, "mlp"), self.config.intermediate_size)
        return rules


def block_ids(anchor: Int[Array, "B A"], config: Config) -> Int[Array, "B A block"]:
    """The ids a draft starts from: each anchor, then mask tokens."""
    masks = jnp.full((*anchor.shape, config.block_size - 1), config.mask_token_id, jnp.int32)
    return jnp.concatenate([anchor[..., None].astype(jnp.int32), masks], axis=-1)


def _layer_rules(prefix: str, path: Path, *, bias: bool) -> Iterator[Rule]:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        at = (*path, "self_attn", name)
        yield Rule(f"{prefix}self_attn.{name}.weight", (*at, "kernel"), TRANSPOSE)
        if bias:
            yield Rule(f"{prefix}self_attn.{name}.bias", (*at, "bias"))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Rule(f"{prefix}{name}.weight", (*path, name, "weight"))
    for name in ("q_norm", "k_norm"):
        yield Rule(f"{prefix}self_attn.{name}.weight", (*path, "self_attn", name, "weight"))


@functools.cache
def _structure(drafter: DFlash) -> tuple[Any, Params]:
    return abstract_module(drafter.build)
