"""Shape of Qwen3.5's multi-token-prediction head, from the target's config."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.weights.hf_config import ConfigError, expect, mrope, require


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of the target's `config.json` that decide the head's computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From a `Qwen3_5ForConditionalGeneration` config.

        Raises:
            ConfigError: a field is missing, or the head is of a kind that is not implemented.
        """
        where = "config.json"
        text = require(config, "text_config", where)
        inside = f"{where} text_config"
        layers = text.get("mtp_num_hidden_layers", 1)
        if not layers:
            raise ConfigError(
                f"{inside}: mtp_num_hidden_layers is {layers}, so this checkpoint has no MTP head; "
                "name another draft"
            )
        expect(
            text, inside, hidden_act=["silu"], attention_bias=[False], mtp_num_hidden_layers=[1],
            mtp_use_dedicated_embeddings=[False],
        )  # fmt: skip
        for place in (config, text):
            expect(place, inside, quantization_config=[None])
        names = [
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps",
        ]  # fmt: skip
        fields = {name: require(text, name, inside) for name in names}
        return cls(**fields, **mrope(text, inside))

    def to_hf(self) -> dict[str, Any]:
        """As much of the target's config as `from_hf` reads."""
        fields = dataclasses.asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": fields.pop("rope_theta"),
            "partial_rotary_factor": fields.pop("rotary_dim") / self.head_dim,
            "mrope_section": list(fields.pop("mrope_section")),
            "mrope_interleaved": True,
        }
        own = {"hidden_act": "silu", "attention_bias": False, "mtp_num_hidden_layers": 1}
        text = {**fields, **own, "rope_parameters": rope}
        return {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
