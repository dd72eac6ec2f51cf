"""Geometry of new drafts, of every kind that is trained."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mmflash_jax.config import positive
from mmflash_jax.weights.hf_config import ConfigError


@dataclass(frozen=True)
class DraftShape:
    """Geometry of a new DFlash draft, which is the kind if none is named. Width, vocabulary and
    layer count of the target are the target's."""

    implied: ClassVar[bool] = True

    num_hidden_layers: int
    """Draft layers."""
    intermediate_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of a head."""
    kind: Literal["dflash"] = "dflash"
    mask_token: str | None = None
    """The target's token that stands in masked slots; its embedding stays frozen."""
    mask_token_id: int | None = None
    """Or its id: a row of the target's table that the tokenizer does not use."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers to read, 0-based. Default: five, spread by z-lab's rule."""
    block_size: int = 16
    """Tokens of a block, anchor included."""
    rope_theta: float = 1e7
    """Rotary base; positions are plain token indices."""
    layer_types: tuple[str, ...] | None = None
    """full_attention or sliding_attention for each layer. Default: all full."""
    sliding_window: int | None = None
    """Window of sliding layers in tokens, the query included."""
    input_embedding_scale: float = 1.0
    """Factor on the token rows that the draft receives; stored with the draft. SGLang hands a Gemma
    draft scaled rows, so a Gemma draft should learn with the root of the hidden size."""
    final_logit_softcapping: float | None = None
    """Cap c of the draft's logits, c * tanh(z / c); stored with the draft. Default: none."""

    def __post_init__(self) -> None:
        positive(
            self, "num_hidden_layers", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rope_theta", "sliding_window",
            "input_embedding_scale", "final_logit_softcapping",
        )  # fmt: skip
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}, it must be at least 2")
        if (self.mask_token is None) == (self.mask_token_id is None):
            raise ConfigError(
                f"mask_token is {self.mask_token!r}, mask_token_id {self.mask_token_id}, give one"
            )


@dataclass(frozen=True)
class MTPShape:
    """A new multi-token-prediction head for a Qwen3.5 target; its geometry is the target's."""

    kind: Literal["mtp"] = "mtp"
    draft_tokens: int = 3
    """Tokens of the chains that it is trained and measured with, each on the head's own hidden
    state of the one before."""

    def __post_init__(self) -> None:
        positive(self, "draft_tokens")


@dataclass(frozen=True)
class Eagle3Shape:
    """Geometry of a new EAGLE-3 draft: one Llama layer and a head of its own over the target's
    vocabulary. Width, vocabulary and frozen token table are the target's."""

    kind: Literal["eagle3"]
    intermediate_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of a head."""
    draft_tokens: int = 3
    """Steps of the training-time test, each on the draft's own hidden state of the one before, and
    tokens of the chains that it is measured with."""
    target_layer_ids: tuple[int, ...] | None = None
    """The three target layers to read, 0-based. Default: EAGLE's, 1, one before the middle, and
    three before the last."""
    rope_theta: float = 1e7
    """Rotary base; positions are plain token indices."""

    def __post_init__(self) -> None:
        positive(
            self, "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "draft_tokens", "rope_theta",
        )  # fmt: skip
        ids = self.target_layer_ids
        if ids is None:
            return
        if len(set(ids)) != 3 or len(ids) != 3 or min(ids) < 0:
            raise ConfigError(f"target_layer_ids is {list(ids)}, it must be three different layers")
        if ids[0] == 0:
            raise ConfigError(
                f"target_layer_ids is {list(ids)}, but EAGLE's layout cannot say that layer 0 is "
                "the first; name it later"
            )
