"""What a Gemma 4 `config.json` says of a layer's attention, for target and assistant."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def layer_kinds(text: Mapping[str, Any], where: str) -> list[str]:
    """`layer_types`, one for each layer.

    Raises:
        ConfigError: their number or a kind is wrong.
    """
    count = require(text, "num_hidden_layers", where)
    kinds = require(text, "layer_types", where)
    unknown = sorted(set(kinds) - set(_KINDS))
    if len(kinds) != count or unknown:
        raise ConfigError(
            f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers {count}"
            + (f" and unknown kinds {unknown}" if unknown else "")
        )
    return kinds


def heads_of(text: Mapping[str, Any], kind: str, index: int, where: str) -> tuple[int, int]:
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


def rotary_of(text: Mapping[str, Any], kind: str, where: str) -> Rotary:
    """Rotary setting of a kind of layer."""
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
