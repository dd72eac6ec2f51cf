"""The layout of the speculators library, which vLLM reads too, from z-lab's and back.

Tensors are the same in both; only `config.json` differs. Follows `DFlashSpeculatorConfig` of
speculators 0.9.0 (speculators/models/dflash/config.py). Its layer ids count the embedding as 0, so
they are z-lab's plus one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmflash_jax.weights.hf_config import ConfigError, expect, require

# What z-lab's layout says of a draft and speculators' cannot, with the value that it stands for.
_UNSAID = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
_OUTSIDE = ("architectures", "auto_map", "block_size", "dflash_config", "is_causal")


def to_speculators(
    config: Mapping[str, Any], verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """A `config.json` as speculators writes it, from one of z-lab's that we wrote.

    verifier: name or folder of the target, whose `architectures` are given.

    Raises:
        ConfigError: the draft is one that the layout cannot describe.
    """
    own = config["dflash_config"]
    for name, default in _UNSAID.items():
        if own.get(name, default) != default:
            raise ConfigError(
                f"{name} is {own[name]!r}, but the speculators layout knows no such field and its "
                f"readers take {default!r}; export to the zlab layout"
            )
    layer = {name: value for name, value in config.items() if name not in _OUTSIDE}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": own["block_size"] - 1}
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config["vocab_size"],
        "block_size": own["block_size"],
        "target_hidden_size": config["target_hidden_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "sliding_window_non_causal": _looks_ahead(config),
        "sample_from_anchor": False,
        "dtype": "bfloat16",
    }


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """z-lab's layout of the same draft. `num_target_layers` is missing if nothing names it.

    Raises:
        ConfigError: a field is missing or asks for what is not implemented.
    """
    where = "draft config.json"
    expect(config, where, speculators_model_type=["dflash"], sample_from_anchor=[False])
    layer = dict(require(config, "transformer_layer_config", where))
    vocab = require(layer, "vocab_size", where)
    if require(config, "draft_vocab_size", where) != vocab:
        raise ConfigError(
            f"{where}: draft_vocab_size is {config['draft_vocab_size']}, vocab_size {vocab}; "
            "drafts with a vocabulary of their own are not supported"
        )
    made = {
        **layer,
        "architectures": ["DFlashDraftModel"],
        "target_hidden_size": config.get("target_hidden_size"),
        "dflash_config": {
            "block_size": require(config, "block_size", where),
            "mask_token_id": require(config, "mask_token_id", where),
            "target_layer_ids": [
                i - 1 for i in require(config, "aux_hidden_state_layer_ids", where)
            ],
        },
    }
    if config.get("sliding_window_non_causal"):
        made["is_causal"] = False
    return made


def _looks_ahead(config: Mapping[str, Any]) -> bool:
    """Whether sliding layers see the whole block; full layers always do in this layout."""
    causal, sliding = config.get("is_causal"), "sliding_attention" in config["layer_types"]
    if causal and "full_attention" in config["layer_types"]:
        raise ConfigError(
            "is_causal is true, but in the speculators layout full attention layers look both "
            "ways; export to the zlab layout"
        )
    return sliding and causal is False
