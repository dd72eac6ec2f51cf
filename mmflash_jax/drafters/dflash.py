"""DFlash / MMFlash: a block of masked slots denoised in one forward pass.

The draft is a stack of Qwen3 layers without embedding or head. Every layer makes its own keys
and values from one projected context vector a token (the target's captured layers); only the
block makes queries. Follows z-lab `dflash` 0.1.0 `model.py` (Chen et al., arXiv 2602.06036).
MMFlash has the same shape and other training.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
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
    made_at_once,
)
from mmflash_jax.drafters.dflash_config import Config, Layer
from mmflash_jax.layers.attention import Attention
from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.norm import RMSNorm
from mmflash_jax.layers.residual import add_product
from mmflash_jax.layers.rotary import rotary_angles
from mmflash_jax.layers.schema import Params, Path, abstract_module, initialise
from mmflash_jax.weights import TRANSPOSE, Rule, mlp_projections
from pallas_kernels import HeadRows, Kernels, Slots, block_attention


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DFlashState:
    """Context keys and values of each layer, `[B, K, S, H]`; slot s holds token s."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


class DecoderLayer(nnx.Module):
    """A Qwen3 layer over the block; the context reaches it as keys and values only."""

    def __init__(self, config: Config, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
        )
        self.self_attn = Attention(config, config.hidden_size, dtype=dtype, rngs=rngs)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B A T D"],
        normed: Float[Array, "B A T D"],
        k_context: Float[Array, "B K S H"],
        v_context: Float[Array, "B K S H"],
        start: Int[Array, "B A"],
        angles: Float[Array, "R T half"],
        first: Int[Array, "B A"] | None,
        following: RMSNorm,
        kernels: Kernels,
        attention_kernels: Kernels,
    ) -> tuple[Float[Array, "B A T D"], Float[Array, "B A T D"]]:
        """`A` blocks of each row over its one context; `R` is `B * A`.

        The stream and its norm, `input_layernorm` before and the `following` one behind.
        """
        attention = self.self_attn
        B, A, T, D = x.shape
        rows = attention.rows(normed.reshape(B * A, T, D), angles, kernels)
        mixed = block_attention(
            rows.q, k_context, v_context, rows.k, rows.v, start.reshape(-1),
            first=None if first is None else first.reshape(-1),
            scale=attention.head_dim**-0.5,
            causal=self.layer.causal,
            window=self.layer.window,
            kernels=attention_kernels,
        )  # fmt: skip
        add = functools.partial(add_product, kernels=kernels)
        mixed = mixed.reshape(B, A, T, -1)
        x, normed = add(x, attention.o_proj, mixed, self.post_attention_layernorm)
        return add(x, self.mlp.down_proj, self.mlp.inner(normed, kernels), following)


class Model(nnx.Module):
    """Context projection, layers and final norm; the head is the target's."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        captured = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = linear(captured, config.hidden_size, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def _angles(self, position: Int[Array, "R T"]) -> Float[Array, "R T half"]:
        return rotary_angles(position, self.config.rope_theta, self.config.head_dim)

    def context(
        self,
        features: Float[Array, "B T features"],
        start: Int[Array, " B"],
        slots: Sequence[Slots | None],
        kernels: Kernels = "reference",
    ) -> list[HeadRows]:
        """Keys and values for tokens at `start ..`, and the caches of `slots`, layer by layer."""
        position = start[:, None] + jnp.arange(features.shape[1])
        projected = self.hidden_norm(self.fc(features.astype(self.fc.dtype)))
        angles = self._angles(position)
        made = []
        for layer, own in zip(self.layers, slots, strict=True):
            rows = layer.self_attn.keys_values(projected, angles, own, kernels)
            # With one input for all layers XLA:GPU joins their products, for which it copies all
            # these weights into one matrix in every step.
            projected, k = lax.optimization_barrier((projected, rows.k))
            made.append(rows._replace(k=k))
        return made

    def denoise(
        self,
        x: Float[Array, "B A T D"],
        state: DFlashState,
        start: Int[Array, "B A"],
        first: Int[Array, "B A"] | None = None,
        kernels: Kernels = "reference",
        attention_kernels: Kernels = "reference",
    ) -> Float[Array, "B A T D"]:
        """Hidden states of `A` blocks a row; block `a` sees context before `start[:, a]` only,
        and from `first[:, a]` on if that is given. `kernels` are of all but attention."""
        B, A, T, _ = x.shape
        angles = self._angles(start.reshape(B * A, 1) + jnp.arange(T))
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed = norms[0](x)
        for layer, k, v, following in zip(self.layers, state.k, state.v, norms[1:], strict=True):
            x, normed = layer(
                x, normed, k, v, start, angles, first, following, kernels, attention_kernels
            )
        return normed


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
