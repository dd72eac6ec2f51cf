"""Shape of a Gemma 4 assistant, from its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.weights.gemma4_layers import Rotary, heads_of, layer_kinds, rotary_of
from mmflash_jax.weights.hf_config import ConfigError, expect, require


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
