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
from jaxtyping import Array

from mmflash_jax.drafters.base import Anchor, Context, FitError, Heads, Proposal
from mmflash_jax.drafters.gemma4_assistant_config import Config
from mmflash_jax.drafters.gemma4_assistant_network import Model
from mmflash_jax.layers.capture import AFTER_NORM
from mmflash_jax.layers.schema import Params, abstract_module
from mmflash_jax.layers.scores import Scores
from mmflash_jax.weights import TRANSPOSE, Rule, mlp_projections
from pallas_kernels import Kernels


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AssistantState:
    """The target's hidden state of each row's last absorbed token, `[B, backbone]`."""

    hidden: Array


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
