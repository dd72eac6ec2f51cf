"""Configuration of an EAGLE-3 draft, in the layout of EAGLE's own checkpoints or of speculators.

EAGLE's (SafeAILab, SpecForge, SGLang) is a Llama config with `draft_vocab_size`; what differs from
plain EAGLE-3 stands in it or in `eagle_config`. That of speculators 0.9.0
(`Eagle3SpeculatorConfig`) nests the layer in `transformer_layer_config`.

A "boundary" k of the target is the hidden state between layers k - 1 and k: the output of layer
k - 1. Layouts count boundaries, except that an EAGLE list which begins with 1 counts outputs
(sglang#25454). Without a list it is boundaries 2, half of the layers, and 3 before the last.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmflash_jax.weights.hf_config import (
    ConfigError,
    expect,
    refuse_foreign_rotary,
    require,
    rope_theta,
)

CAPTURED = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of a draft's `config.json` that decide the computation.

    normed_heads: queries and keys are normed, as Qwen3's.
    window: of the draft's attention, in tokens, or None for all.
    target_layer_ids: outputs of the target's layers, 0-based; None if the layout leaves them to the
        target's number of layers (`default_layer_ids`).
    norm_before_residual: the residual is the normed hidden state.
    norm_before_fc: one norm over the joined features; fc_norm: one for each captured layer.
    norm_output: the draft is fed with its hidden state after the last norm.
    prefix: of the layer's tensors.
    draft_tokens: how many tokens the checkpoint asks to draft, if it does.
    max_position_embeddings: longest row; not used here, but other servers read it.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    normed_heads: bool
    rope_theta: float
    window: int | None
    target_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    prefix: str
    draft_tokens: int | None
    max_position_embeddings: int = 32768

    @property
    def captured(self) -> int:
        """How many layers of the target are read."""
        return CAPTURED if self.target_layer_ids is None else len(self.target_layer_ids)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From either layout.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "draft config.json"
        speculators = "speculators_model_type" in config
        layer, own = _speculators(config, where) if speculators else _eagle(config, where)
        inside = f"{where} transformer_layer_config" if speculators else where
        expect(layer, inside, hidden_act=["silu"], mlp_bias=[False], pretraining_tp=[1])
        refuse_foreign_rotary(layer, inside)
        names = [
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "rms_norm_eps",
        ]  # fmt: skip
        fields = {name: require(layer, name, inside) for name in names}
        width, heads = fields["hidden_size"], fields["num_attention_heads"]
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        made = cls(
            **fields,
            draft_vocab_size=require(config, "draft_vocab_size", where),
            target_hidden_size=own.get("target_hidden_size") or width,
            head_dim=layer.get("head_dim") or width // heads,
            attention_bias=bool(layer.get("attention_bias", False)),
            normed_heads=layer.get("model_type") == "qwen3",
            rope_theta=rope_theta(layer, inside),
            window=_window(layer, inside),
            target_layer_ids=_layer_ids(own, where, speculators=speculators),
            **{name: bool(own.get(name, False)) for name in flags},
            prefix="layers.0." if speculators else "midlayer.",
            draft_tokens=_draft_tokens(config),
            max_position_embeddings=layer.get("max_position_embeddings", 32768),
        )
        if made.norm_before_fc and made.fc_norm:
            raise ConfigError(
                f"{where}: norm_before_fc and fc_norm exclude each other, both are set"
            )
        if not 1 <= made.draft_vocab_size <= made.vocab_size:
            raise ConfigError(
                f"{where}: draft_vocab_size is {made.draft_vocab_size}, it must be from 1 to "
                f"vocab_size {made.vocab_size}"
            )
        return made

    def to_hf(self) -> dict[str, Any]:
        """In EAGLE's layout, as SGLang, vLLM and `from_hf` read it.

        Raises:
            ConfigError: it cannot say this; the fields at fault are named.
        """
        ids = self.target_layer_ids
        if self.normed_heads or self.draft_tokens is not None or not ids or ids[0] == 0:
            raise ConfigError(
                f"EAGLE's layout has no normed_heads ({self.normed_heads}) and no draft_tokens "
                f"({self.draft_tokens}), and target_layer_ids ({ids}) must be there and not begin "
                "with 0"
            )
        fields = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in ("normed_heads", "draft_tokens", "prefix", "target_layer_ids", "window")
        }
        if self.window is not None:
            fields |= {"layer_types": ["sliding_attention"], "sliding_window": self.window}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **fields,
            "eagle_config": {
                "use_aux_hidden_state": True,
                # Boundaries: a list that begins with 1 would be read as outputs.
                "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
            },
        }


def default_layer_ids(target_layers: int) -> tuple[int, ...]:
    """Outputs of the target's layers that a draft reads when its config names none.

    Raises:
        ConfigError: the target is too shallow for three different ones.
    """
    boundaries = (2, target_layers // 2, target_layers - 3)
    if len(set(boundaries)) < CAPTURED or min(boundaries) < 1:
        raise ConfigError(
            f"no layers of the target are named (eagle_aux_hidden_state_layer_ids in the draft's "
            f"config, draft.target_layer_ids in training), and the default boundaries {boundaries} "
            f"mean nothing for a target of {target_layers} layers"
        )
    return tuple(boundary - 1 for boundary in boundaries)


def _eagle(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layer and EAGLE's own fields, at top level and in `eagle_config`."""
    if config.get("draft_vocab_size") is None:
        raise ConfigError(
            f"{where} lacks 'draft_vocab_size', which every EAGLE-3 draft has: a plain Llama is no "
            "draft; name another folder"
        )
    nested = dict(config.get("eagle_config") or {})
    expect(config, where, model_type=["llama"])
    expect(nested, f"{where} eagle_config", use_aux_hidden_state=[True])
    for name in nested:
        if name in config and config[name] is not None and config[name] != nested[name]:
            raise ConfigError(
                f"{where}: {name} is {nested[name]!r} in eagle_config but {config[name]!r} at top "
                "level"
            )
    given = {name: value for name, value in config.items() if value is not None}
    return dict(config), nested | given


def _speculators(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The nested layer, and speculators' own fields."""
    expect(config, where, speculators_model_type=["eagle3"], embed_requires_grad=[False])
    layer = dict(require(config, "transformer_layer_config", where))
    inside = f"{where} transformer_layer_config"
    expect(layer, inside, model_type=["llama", "qwen3"], num_hidden_layers=[1])
    return layer, dict(config)


def _window(layer: Mapping[str, Any], where: str) -> int | None:
    kinds = layer.get("layer_types") or ["full_attention"]
    if kinds[0] == "full_attention":
        return None
    if kinds[0] != "sliding_attention" or not layer.get("sliding_window"):
        raise ConfigError(
            f"{where}: layer_types is {kinds} with sliding_window {layer.get('sliding_window')!r}, "
            "supported: full_attention, or sliding_attention with a window"
        )
    return int(layer["sliding_window"])


def _layer_ids(own: Mapping[str, Any], where: str, *, speculators: bool) -> tuple[int, ...] | None:
    ids = own.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return None
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"{where}: eagle_aux_hidden_state_layer_ids is {ids!r}, expected numbers")
    outputs = list(ids) if ids[0] == 1 and not speculators else [i - 1 for i in ids]
    if min(outputs) < 0 or len(set(outputs)) < len(outputs):
        raise ConfigError(
            f"{where}: eagle_aux_hidden_state_layer_ids is {list(ids)}, expected different numbers "
            "of at least 1: the embedding (0) is no output of a layer"
        )
    return tuple(outputs)


def _draft_tokens(config: Mapping[str, Any]) -> int | None:
    """What speculators' default proposal drafts."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    return next((m["speculative_tokens"] for m in methods if m.get("speculative_tokens")), None)
