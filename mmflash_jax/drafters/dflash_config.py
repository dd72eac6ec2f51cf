"""Configuration of a DFlash draft in z-lab's layout, read and written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.drafters.speculators_layout import from_speculators
from mmflash_jax.weights.hf_config import (
    ConfigError,
    expect,
    refuse_foreign_rotary,
    require,
    rope_theta,
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """How one layer looks: `window` in tokens, the query included, or None for all."""

    causal: bool
    window: int | None


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of a draft's `config.json` that decide the computation."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    vocab_size: int
    layers: tuple[Layer, ...]
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    max_position_embeddings: int = 32768
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From z-lab's layout, whose own keys sit in `dflash_config` or at top level.

        The layout of speculators is read too; it need not name `num_target_layers`.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "draft config.json"
        needed = ["num_target_layers"]
        if "speculators_model_type" in config:
            config, needed = from_speculators(config), []
        expect(config, where, hidden_act=["silu"], architectures=[["DFlashDraftModel"]])
        refuse_foreign_rotary(config, where)
        names = [
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "vocab_size", *needed,
        ]  # fmt: skip
        fields = {name: require(config, name, where) for name in names}
        ids = _own(config, "target_layer_ids")
        if ids is None:
            layers = require(config, "num_hidden_layers", where)
            ids = default_layer_ids(fields["num_target_layers"], layers)
        mask = _own(config, "mask_token_id")
        if isinstance(mask, bool) or not isinstance(mask, int):
            raise ConfigError(f"{where}: mask_token_id is {mask!r}, expected a token id")
        block = _own(config, "block_size", 16)
        if isinstance(block, bool) or not isinstance(block, int) or block < 2:
            raise ConfigError(f"{where}: block_size is {block!r}, expected a number of at least 2")
        cap = _own(config, "final_logit_softcapping")
        return cls(
            **{"num_target_layers": config.get("num_target_layers"), **fields},
            target_hidden_size=config.get("target_hidden_size") or fields["hidden_size"],
            attention_bias=bool(config.get("attention_bias", False)),
            rope_theta=rope_theta(config, where),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            layers=_layers(config, where),
            target_layer_ids=tuple(ids),
            mask_token_id=mask,
            block_size=block,
            input_embedding_scale=float(_own(config, "input_embedding_scale", 1.0)),
            output_multiplier=float(_own(config, "output_multiplier", 1.0)),
            final_logit_softcapping=float(cap) if cap else None,
        )

    def to_hf(self) -> dict[str, Any]:
        """z-lab's layout, which SGLang and vLLM load; `from_hf` of it gives this config back.

        It carries no partial-rotary and no M-RoPE key: servers would rotate other dimensions.
        """
        widths = {layer.window for layer in self.layers} - {None}
        if len(widths) > 1:
            raise ConfigError(f"the layout holds one sliding_window, the layers use {widths}")
        kinds = ["sliding_attention" if layer.window else "full_attention" for layer in self.layers]
        own: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
            "input_embedding_scale": self.input_embedding_scale,
            "output_multiplier": self.output_multiplier,
        }
        if self.final_logit_softcapping is not None:
            own["final_logit_softcapping"] = self.final_logit_softcapping
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "block_size": self.block_size,
            "dflash_config": own,
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": len(self.layers),
            "layer_types": kinds,
            "sliding_window": widths.pop() if widths else None,
            "use_sliding_window": "sliding_attention" in kinds,
            "max_window_layers": len(self.layers),
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": 0.02,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": True,
            "use_cache": True,
        }
        if any(layer.causal != (layer.window is not None) for layer in self.layers):
            directions = {layer.causal for layer in self.layers}
            if len(directions) > 1:
                raise ConfigError("the layout holds one is_causal for all layers")
            config["is_causal"] = directions.pop()
        return config


def default_layer_ids(target_layers: int, count: int) -> list[int]:
    """Target layers a draft reads when its config names none (z-lab's rule).

    Spread from layer 1 to the fourth from the end, rounded half to even.
    """
    if count == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]


def _own(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A DFlash key, in `dflash_config` or at top level; two different values are an error."""
    nested, top = (config.get("dflash_config") or {}).get(name), config.get(name)
    if nested is not None and top is not None and nested != top:
        raise ConfigError(
            f"draft config.json: {name} is {nested!r} in dflash_config but {top!r} at top level"
        )
    found = top if nested is None else nested
    return default if found is None else found


def _layers(config: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    """Window and direction of each layer.

    Direction: top-level `is_causal` before `dflash_config.causal` before the layer's kind
    (sliding layers look back only, full ones both ways). `dflash_config.use_swa` makes every
    layer a sliding one that looks both ways.
    """
    own = config.get("dflash_config") or {}
    count = require(config, "num_hidden_layers", where)
    kinds = config.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count:
        raise ConfigError(
            f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers {count}"
        )
    everywhere = own.get("use_swa", False)
    forced = config.get("is_causal")
    if forced is None:
        forced = own.get("causal", False if everywhere else None)
    layers = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{where}: layer_types holds {kind!r}")
        sliding = everywhere or kind == "sliding_attention"
        width = own.get("swa_window_size") if everywhere else None
        width = width or config.get("sliding_window")
        if sliding and not width:
            raise ConfigError(f"{where}: a sliding layer needs sliding_window, it is {width!r}")
        causal = sliding if forced is None else bool(forced)
        layers.append(Layer(causal=causal, window=int(width) if sliding and width else None))
    return tuple(layers)
