"""Gemma 4's assistant: a narrow decoder of queries alone, over the target's keys and values.

Each layer reads what the target's last layer of the same kind reads. The assistant has no cache; a
draft is linked to the one before by its token and a vector of the target's width, which at first is
the target's hidden state of the token before the anchor and then the assistant's own. All drafts of
a step stand at one position, that of the anchor, and see the tokens before it.

Follows transformers 5.24 `models/gemma4_assistant/modeling_gemma4_assistant.py` and
`SinglePositionMultiTokenCandidateGenerator`. vLLM and SGLang rotate queries at one position less;
which one the weights were trained for could not be measured without them. Drafts never change what
is answered, only how often they are accepted.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mmflash_jax.drafters.base import Anchor, Context, FitError, Heads, Proposal
from mmflash_jax.layers.cache import CachedKeys
from mmflash_jax.layers.capture import AFTER_NORM
from mmflash_jax.layers.linear import Embedding, linear
from mmflash_jax.layers.mlp import GeGLU
from mmflash_jax.layers.norm import GemmaRMSNorm
from mmflash_jax.layers.rotary import proportional_angles
from mmflash_jax.layers.schema import Params, abstract_module
from mmflash_jax.layers.scores import Scores
from mmflash_jax.weights import TRANSPOSE, Rule, mlp_projections
from mmflash_jax.weights.gemma4_layers import Rotary, heads_of, layer_kinds, rotary_of
from mmflash_jax.weights.hf_config import ConfigError, expect, require
from pallas_kernels import Kernels, apply_rotary, block_attention
from pallas_kernels.product import matmul_precision


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention of a layer: its kind, the target's head width and heads, window and rotary."""

    kind: str
    head_dim: int
    kv_heads: int
    window: int | None
    rotary: Rotary


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of `config.json` that decide the computation; names are the file's own.

    num_centroids: groups of the vocabulary, None for a head over all of it.
    """

    backbone_hidden_size: int
    num_centroids: int | None
    centroid_intermediate_top_k: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    layers: tuple[Layer, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From a `Gemma4AssistantForCausalLM` config.

        Its soft cap, if it has one, is not applied: neither does transformers.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "draft config.json"
        text = require(config, "text_config", where)
        inside = f"{where} text_config"
        expect(config, where, tie_word_embeddings=[True], quantization_config=[None])
        kinds = layer_kinds(text, inside)
        expect(
            text,
            inside,
            hidden_activation=["gelu_pytorch_tanh"],
            attention_bias=[False, None],
            attention_k_eq_v=[False, None],
            enable_moe_block=[False, None],
            hidden_size_per_layer_input=[0],
            num_kv_shared_layers=[len(kinds)],
            use_double_wide_mlp=[False, None],
        )
        names = [
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps",
        ]  # fmt: skip
        fields = {name: require(text, name, inside) for name in names}
        grouped = bool(require(config, "use_ordered_embeddings", where))
        groups = require(config, "num_centroids", where) if grouped else None
        chosen = require(config, "centroid_intermediate_top_k", where) if grouped else 0
        if groups and (fields["vocab_size"] % groups or not 0 < chosen <= groups):
            raise ConfigError(
                f"{where}: num_centroids {groups} must divide vocab_size {fields['vocab_size']} "
                f"and be at least centroid_intermediate_top_k {chosen}"
            )
        return cls(
            **fields,
            backbone_hidden_size=require(config, "backbone_hidden_size", where),
            num_centroids=groups,
            centroid_intermediate_top_k=chosen,
            layers=tuple(_layer(text, kind, i, inside) for i, kind in enumerate(kinds)),
        )


def _layer(text: Mapping[str, Any], kind: str, index: int, where: str) -> Layer:
    head_dim, kv_heads = heads_of(text, kind, index, where)
    sliding = kind == "sliding_attention"
    return Layer(
        kind=kind,
        head_dim=head_dim,
        kv_heads=kv_heads,
        window=require(text, "sliding_window", where) if sliding else None,
        rotary=rotary_of(text, kind, where),
    )


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AssistantState:
    """The target's hidden state of each row's last absorbed token, `[B, backbone]`."""

    hidden: Array


class Attention(nnx.Module):
    """Queries over the target's committed tokens, without a score scale."""

    def __init__(self, config: Config, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.layer, self.heads = layer, config.num_attention_heads
        inner = self.heads * layer.head_dim
        self.q_proj = linear(config.hidden_size, inner, dtype=dtype, rngs=rngs)
        self.o_proj = linear(inner, config.hidden_size, dtype=dtype, rngs=rngs)
        self.q_norm = GemmaRMSNorm(layer.head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B 1 D"], keys: CachedKeys, anchor: Anchor, kernels: Kernels
    ) -> Float[Array, "B 1 D"]:
        layer, B = self.layer, x.shape[0]
        rotary = layer.rotary
        angles = proportional_angles(
            anchor.positions[0][:, None], rotary.theta, layer.head_dim, rotary.share
        )
        q = apply_rotary(self.q_norm(self.q_proj(x).reshape(B, 1, self.heads, -1)), angles)
        # The attention operation wants a block: the newest token is one.
        newest = jnp.maximum(anchor.length - 1, 0)
        k, v = keys.row(newest)
        mixed = block_attention(
            q, k_cache=keys.cache.k, v_cache=keys.cache.v, k_block=k, v_block=v, length=newest,
            scale=1.0, causal=True, ring=keys.ring, kernels=kernels,
            # In transformers `window` tokens before the newest and that one: one more than the
            # target's own queries see.
            window=None if layer.window is None else layer.window + 1,
        )  # fmt: skip
        return self.o_proj(mixed.reshape(B, 1, -1))


class DecoderLayer(nnx.Module):
    """Attention and MLP, each between two norms; then the layer's scalar."""

    def __init__(self, config: Config, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = config.hidden_size
        norm = functools.partial(GemmaRMSNorm, width, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = GeGLU(width, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self, x: Float[Array, "B 1 D"], keys: CachedKeys, anchor: Anchor, kernels: Kernels
    ) -> Float[Array, "B 1 D"]:
        mixed = self.self_attn(self.input_layernorm(x), keys, anchor, kernels)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar[...]


class Model(nnx.Module):
    """Projections from and to the target's width, layers, and a head over likely tokens."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, outer = config.hidden_size, config.backbone_hidden_size
        self.pre_projection = linear(2 * outer, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.norm = GemmaRMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)
        self.post_projection = linear(width, outer, dtype=dtype, rngs=rngs)
        self.embed_tokens = Embedding(config.vocab_size, width, dtype=dtype, rngs=rngs)
        if config.num_centroids is not None:
            self.centroids = linear(width, config.num_centroids, dtype=dtype, rngs=rngs)
            self.token_ordering = nnx.Param(jnp.arange(config.vocab_size, dtype=jnp.int32))

    def __call__(
        self,
        row: Float[Array, "B 1 backbone"],
        hidden: Float[Array, "B 1 backbone"],
        keys: Mapping[str, CachedKeys],
        anchor: Anchor,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B 1 V"], Float[Array, "B 1 backbone"]]:
        """fp32 logits of the token after the one of `row`, and the next `hidden`."""
        x = self.pre_projection(jnp.concatenate([row, hidden], axis=-1))
        for layer in self.layers:
            x = layer(x, keys[layer.self_attn.layer.kind], anchor, kernels)
        x = self.norm(x)
        return self._logits(x), self.post_projection(x)

    def _logits(self, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 V"]:
        """Of the tokens of the likeliest centroids; the others are excluded."""
        if self.config.num_centroids is None:
            return self.embed_tokens.attend(x)
        _, groups = lax.top_k(self.centroids(x), self.config.centroid_intermediate_top_k)
        ordering = self.token_ordering[...].reshape(self.config.num_centroids, -1)
        ids = ordering[groups].reshape(*x.shape[:2], -1)
        table = self.embed_tokens(ids)
        found = jnp.einsum(
            "BTD,BTCD->BTC", x, table, precision=matmul_precision(table.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        none = jnp.full((*x.shape[:2], self.config.vocab_size), -jnp.inf, jnp.float32)
        rows = jnp.arange(x.shape[0])[:, None, None]
        return none.at[rows, 0, ids].set(found)


@dataclass(frozen=True)
class Gemma4Assistant:
    """The plan of an assistant that drafts `draft_tokens` tokens; see `drafters.base.Drafter`."""

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"
    draft_tokens: int = 5

    ignored: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype: str, kernels: Kernels = "reference"
    ) -> "Gemma4Assistant":
        return cls(Config.from_hf(config), dtype, kernels)

    @property
    def block(self) -> int:
        return self.draft_tokens + 1

    @property
    def capture(self) -> tuple[int, ...]:
        return (AFTER_NORM,)

    def check_fit(self, target: Any) -> None:
        """Refuse a target whose keys and values this assistant cannot read.

        Raises:
            FitError: one message, each field with both values.
        """
        c, theirs = self.config, getattr(target, "layers", ())
        problems = []
        if c.backbone_hidden_size != target.hidden_size:
            problems.append(
                f"backbone_hidden_size: draft {c.backbone_hidden_size}, target's hidden_size "
                f"{target.hidden_size}"
            )
        if c.vocab_size != target.vocab_size:
            problems.append(f"vocab_size: draft {c.vocab_size}, target {target.vocab_size}")
        for layer in {layer.kind: layer for layer in c.layers}.values():
            read = [one for one in theirs if (one.window is None) == (layer.window is None)]
            if not read:
                problems.append(f"{layer.kind}: the target has no such Gemma 4 layer")
                continue
            for name in ("head_dim", "kv_heads", "window", "rotary"):
                ours, its = getattr(layer, name), getattr(read[-1], name)
                if ours != its:
                    problems.append(f"{name} of {layer.kind}: draft {ours}, target {its}")
        if problems:
            raise FitError("assistant and target do not fit: " + "; ".join(problems))

    def abstract_params(self) -> Params:
        return _structure(self.config, self.dtype)[1]

    def model(self, params: Params) -> Model:
        """The module over `params`; call inside `jax.jit`."""
        return nnx.merge(_structure(self.config, self.dtype)[0], params)

    def init_state(self, batch: int, capacity: int) -> AssistantState:
        del capacity
        shape = (batch, self.config.backbone_hidden_size)
        return AssistantState(hidden=jnp.zeros(shape, jnp.dtype(self.dtype)))

    def absorb(self, params: Params, state: AssistantState, context: Context) -> AssistantState:
        del params
        count = context.count[:, None]
        place = jnp.maximum(count - 1, 0)[..., None]
        last = jnp.take_along_axis(context.features, place, axis=1)[:, 0]
        return AssistantState(hidden=jnp.where(count > 0, last, state.hidden))

    def propose(
        self, params: Params, state: AssistantState, anchor: Anchor, heads: Heads
    ) -> Proposal:
        model = self.model(params)
        kinds = dict.fromkeys(layer.kind for layer in self.config.layers)
        keys = {kind: heads.keys_values(kind) for kind in kinds}
        # As the target scales its rows: rounded to the dtype of the weights first.
        scale = jnp.asarray(self.config.backbone_hidden_size**0.5, jnp.dtype(self.dtype))

        def draft(carry: tuple[Array, Array], step: Any) -> tuple[tuple[Array, Array], Array]:
            ids, hidden = carry
            row = heads.embed(ids).astype(hidden.dtype) * scale
            logits, hidden = model(row, hidden, keys, anchor, self.kernels)
            ids = heads.pick(Scores.of(logits), step)
            return (ids, hidden), ids[:, 0]

        start = (anchor.ids[:, None], state.hidden[:, None])
        _, ids = lax.scan(draft, start, jnp.arange(self.draft_tokens))
        return Proposal(ids=ids.T)

    def weight_rules(self) -> list[Rule]:
        rules = [
            Rule("model.embed_tokens.weight", ("embed_tokens", "embedding")),
            Rule("model.norm.weight", ("norm", "weight")),
            Rule("pre_projection.weight", ("pre_projection", "kernel"), TRANSPOSE),
            Rule("post_projection.weight", ("post_projection", "kernel"), TRANSPOSE),
        ]
        if self.config.num_centroids is not None:
            centroids = ("centroids", "kernel")
            rules.append(Rule("masked_embedding.centroids.weight", centroids, TRANSPOSE))
            rules.append(Rule("masked_embedding.token_ordering", ("token_ordering",)))
        for index in range(len(self.config.layers)):
            for name in _LINEAR:
                path = ("layers", index, *name.split("."), "kernel")
                rules.append(Rule(f"model.layers.{index}.{name}.weight", path, TRANSPOSE))
            for name in _PLAIN:
                path = ("layers", index, *name.split("."))
                rules.append(Rule(f"model.layers.{index}.{name}", path))
            mlp = ("layers", index, "mlp")
            rules += mlp_projections(
                f"model.layers.{index}.mlp.", mlp, self.config.intermediate_size
            )
        return rules


_LINEAR = ("self_attn.q_proj", "self_attn.o_proj")
_PLAIN = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
    "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "layer_scalar",
)  # fmt: skip


@functools.cache
def _structure(config: Config, dtype: str) -> tuple[Any, Params]:
    return abstract_module(lambda rngs: Model(config, dtype=jnp.dtype(dtype), rngs=rngs))
