"""The part of a Gemma 4 `config.json` that decides the computation (E2B and E4B)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.towers.gemma4_vision_config import VisionConfig
from mmflash_jax.weights.gemma4_layers import Rotary, heads_of, layer_kinds, rotary_of
from mmflash_jax.weights.hf_config import ConfigError, expect, require


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Shape of one decoder layer.

    window: tokens a query sees, itself included; None for all.
    source: the layer whose keys and values this one reads; its own index if it makes them.
    """

    head_dim: int
    kv_heads: int
    intermediate_size: int
    window: int | None
    rotary: Rotary
    source: int


@dataclass(frozen=True, kw_only=True)
class Config:
    """Names are the file's own; what it says of single layers is gathered in `layers`."""

    vocab_size: int
    vocab_size_per_layer_input: int
    hidden_size: int
    hidden_size_per_layer_input: int
    num_attention_heads: int
    rms_norm_eps: float
    final_logit_softcapping: float | None
    max_position_embeddings: int
    pad_token_id: int
    image_token_id: int
    boi_token_id: int
    eoi_token_id: int
    layers: tuple[Layer, ...]
    vision: VisionConfig

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From a `Gemma4ForConditionalGeneration` config.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "config.json"
        text = require(config, "text_config", where)
        inside = f"{where} text_config"
        expect(config, where, tie_word_embeddings=[True])
        expect(
            text,
            inside,
            hidden_activation=["gelu_pytorch_tanh"],
            attention_bias=[False, None],
            attention_k_eq_v=[False, None],
            enable_moe_block=[False, None],
            tie_word_embeddings=[True],
            # Image tokens that see each other both ways: 12B and larger have it, E2B/E4B do not.
            use_bidirectional_attention=[None],
        )
        names = [
            "vocab_size", "vocab_size_per_layer_input", "hidden_size",
            "hidden_size_per_layer_input", "num_attention_heads", "rms_norm_eps",
            "max_position_embeddings", "pad_token_id",
        ]  # fmt: skip
        fields = {name: require(text, name, inside) for name in names}
        if not fields["hidden_size_per_layer_input"]:
            raise ConfigError(f"{inside}: hidden_size_per_layer_input is 0, supported: E2B and E4B")
        tokens = ("image_token_id", "boi_token_id", "eoi_token_id")
        return cls(
            **fields,
            **{name: require(config, name, where) for name in tokens},
            final_logit_softcapping=text.get("final_logit_softcapping"),
            layers=_layers(text, inside),
            vision=VisionConfig.from_hf(
                require(config, "vision_config", where), fields["hidden_size"]
            ),
        )


def _layers(text: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    kinds = layer_kinds(text, where)
    count = len(kinds)
    if kinds[-1] != "full_attention":
        raise ConfigError(f"{where}: layer_types ends with {kinds[-1]!r}, must be full_attention")
    shared = text.get("num_kv_shared_layers") or 0
    own = count - shared
    if not 0 <= shared < count or set(kinds[:own]) != set(kinds):
        raise ConfigError(
            f"{where}: num_kv_shared_layers is {shared}, but the {own} layers before them must "
            f"hold every kind of {sorted(set(kinds))}"
        )
    window, width = (
        require(text, "sliding_window", where),
        require(text, "intermediate_size", where),
    )
    layers = []
    for index, kind in enumerate(kinds):
        head_dim, kv_heads = heads_of(text, kind, index, where)
        # Readers take the last maker of their kind (transformers 5.24 `kv_sharing_modes`).
        source = index if index < own else max(i for i in range(own) if kinds[i] == kind)
        double = index >= own and bool(text.get("use_double_wide_mlp"))
        layers.append(
            Layer(
                head_dim=head_dim,
                kv_heads=kv_heads,
                intermediate_size=width * (2 if double else 1),
                window=window if kind == "sliding_attention" else None,
                rotary=rotary_of(text, kind, where),
                source=source,
            )
        )
    return tuple(layers)
