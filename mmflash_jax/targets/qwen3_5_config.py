"""Configuration of a Qwen3.5 target, read from its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.towers.qwen3_5_vision import VisionConfig
from mmflash_jax.weights.hf_config import ConfigError, expect, mrope, require


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of `config.json` that decide the computation; names are the file's own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    max_position_embeddings: int
    tie_word_embeddings: bool
    image_token_id: int
    vision: VisionConfig

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def delta_channels(self) -> int:
        """Channels of the delta net's convolution: queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From a `Qwen3_5ForConditionalGeneration` config.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "config.json"
        text = require(config, "text_config", where)
        inside = f"{where} text_config"
        expect(text, inside, hidden_act=["silu"], attention_bias=[False])
        names = [
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "linear_conv_kernel_dim",
            "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads", "max_position_embeddings",
        ]  # fmt: skip
        fields = {name: require(text, name, inside) for name in names}
        return cls(
            **fields,
            layer_types=_layer_types(text, inside),
            **mrope(text, inside),
            tie_word_embeddings=_tied(config, text),
            image_token_id=require(config, "image_token_id", where),
            vision=VisionConfig.from_hf(require(config, "vision_config", where)),
        )


def _layer_types(text: Mapping[str, Any], where: str) -> tuple[str, ...]:
    layers = require(text, "num_hidden_layers", where)
    types = text.get("layer_types")
    if types is None:
        every = require(text, "full_attention_interval", where)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    unknown = set(types) - {"linear_attention", "full_attention"}
    if len(types) != layers or unknown:
        raise ConfigError(
            f"{where}: layer_types has {len(types)} entries for num_hidden_layers {layers}"
            + (f" and unknown kinds {sorted(unknown)}" if unknown else "")
        )
    return tuple(types)


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    # transformers reads the top level for the whole model; older files say it in the text part.
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    return bool(text.get("tie_word_embeddings", False))
