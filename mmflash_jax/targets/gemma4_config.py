"""The part of a Gemma 4 `config.json` that decides the computation (E2B and E4B)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.towers.gemma4_vision import VisionConfig
from mmflash_jax.weights.hf_config import ConfigError, expect, require

_KINDS = ("sliding_attention", "full_attention")
# transformers 5.24 `Gemma4TextConfig`; the released files say the same.
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary setting of a kind of layer: only the first `share` of the frequencies turn."""

    theta: float
    share: float


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
    count = require(text, "num_hidden_layers", where)
    kinds = require(text, "layer_types", where)
    unknown = sorted(set(kinds) - set(_KINDS))
    if len(kinds) != count or unknown:
        raise ConfigError(
            f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers {count}"
            + (f" and unknown kinds {unknown}" if unknown else "")
        )
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
        head_dim, kv_heads = _heads(text, kind, index, where)
        # Readers take the last maker of their kind (transformers 5.24 `kv_sharing_modes`).
        source = index if index < own else max(i for i in range(own) if kinds[i] == kind)
        double = index >= own and bool(text.get("use_double_wide_mlp"))
        layers.append(
            Layer(
                head_dim=head_dim,
                kv_heads=kv_heads,
                intermediate_size=width * (2 if double else 1),
                window=window if kind == "sliding_attention" else None,
                rotary=_rotary(text, kind, where),
                source=source,
            )
        )
    return tuple(layers)


def _heads(text: Mapping[str, Any], kind: str, index: int, where: str) -> tuple[int, int]:
    """Head width and key/value heads of a layer, in either spelling.

    The released files give full layers `global_head_dim` and `num_global_key_value_heads`;
    transformers since 5.15 writes a map from layer index to what differs there.
    """
    head_dim = require(text, "head_dim", where)
    kv_heads = require(text, "num_key_value_heads", where)
    overrides = text.get("per_layer_config")
    if overrides is not None:
        # Keys are padded with zeros: "05" beside "11".
        mine = next((v for k, v in overrides.items() if int(k) == index), {})
        foreign = sorted(set(mine) - {"head_dim", "num_key_value_heads"})
        if foreign:
            raise ConfigError(f"{where}: per_layer_config of layer {index} holds {foreign}")
        return mine.get("head_dim", head_dim), mine.get("num_key_value_heads", kv_heads)
    if kind == "sliding_attention":
        return head_dim, kv_heads
    # `num_global_key_value_heads` counts only with `attention_k_eq_v`, which is refused above.
    return require(text, "global_head_dim", where), kv_heads


def _rotary(text: Mapping[str, Any], kind: str, where: str) -> Rotary:
    rope = (text.get("rope_parameters") or _ROPE).get(kind)
    if rope is None:
        raise ConfigError(f"{where}: rope_parameters lacks {kind!r}")
    inside = f"{where} rope_parameters {kind}"
    expect(rope, inside, rope_type=["default", "proportional"], factor=[1.0, None])
    partial = rope.get("partial_rotary_factor")
    share = 1.0 if partial is None else float(partial)
    if rope.get("rope_type", "default") == "default" and share != 1.0:
        raise ConfigError(f"{inside}: partial_rotary_factor is {share} without proportional rope")
    return Rotary(theta=float(require(rope, "rope_theta", inside)), share=share)
