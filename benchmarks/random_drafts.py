"""Random checkpoints of chain and tree drafts, of the published sizes, for any target's config.

Names and shapes are those that the loaders require, in each method's Hugging Face layout: an MTP
head lies beside its target's weights, an assistant and an EAGLE-3 draft in folders of their own.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import shapes
from mmflash_jax.drafters import Eagle3, Gemma4Assistant, Qwen35MTP
from mmflash_jax.drafters.eagle3_config import default_layer_ids
from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.weights import TensorStore, write_checkpoint
from mmflash_jax.weights.gemma4_layers import heads_of

Tensors = dict[str, np.ndarray]
INDEX = "model.safetensors.index.json"
SPREAD = 20.0
"""Standard deviation of an EAGLE-3 draft's logits. At 1 all tokens would be about as likely, and
trees as flat as they can be; so the best is as clear as a trained draft's, and trees are deep."""


def write_drafts(
    folder: Path,
    *,
    eagle3: Mapping[str, Any] | None = None,
    assistant: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Beside the target in `folder`/target: every other draft that its family has.

    `eagle3` and `assistant` replace fields of the published sizes.
    """
    target = folder / "target"
    config = json.loads((target / "config.json").read_text())
    text = config["text_config"]
    written = [write_eagle3(folder / "eagle3", eagle3_config(text, **(eagle3 or {})))]
    if config["architectures"] == ["Qwen3_5ForConditionalGeneration"]:
        return [*written, add_mtp_head(target, config)]
    made = assistant_config(text, **(assistant or {}))
    return [*written, write_assistant(folder / "assistant", made)]


def eagle3_config(text: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """EAGLE's layout, for a target with that text config."""
    layers = text["num_hidden_layers"]
    # Trial targets are too shallow for the default.
    outputs = default_layer_ids(layers) if layers >= 8 else range(max(layers - 3, 0), layers)
    boundaries = [output + 1 for output in outputs]
    if boundaries[0] == 1:
        # A list that begins with 1 counts outputs.
        raise ValueError(f"an EAGLE-3 draft needs a target of 4 layers or more, not {layers}")
    return {
        **shapes.EAGLE3_DRAFT,
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": boundaries},
        **changes,
    }


def assistant_config(text: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """For a target with that text config, whose keys and values the assistant reads."""
    shared = (
        "vocab_size", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters",
        "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    inner = {**shapes.GEMMA4_ASSISTANT_TEXT, **{name: text[name] for name in shared}}
    full = text["layer_types"].index("full_attention")
    inner["global_head_dim"], _ = heads_of(text, "full_attention", full, "target config.json")
    inner |= {name: value for name, value in changes.items() if name in inner}
    outer = {**shapes.GEMMA4_ASSISTANT, "backbone_hidden_size": text["hidden_size"]}
    outer |= {name: value for name, value in changes.items() if name in outer}
    return {**outer, "text_config": inner}


def write_eagle3(folder: Path, config: dict[str, Any]) -> Path:
    """Its vocabulary is a random part of the target's."""
    random = np.random.default_rng(3)
    drafter = Eagle3.from_hf(config, "bfloat16")
    known = random.permutation(config["vocab_size"])[: config["draft_vocab_size"]]
    known.sort()
    is_known = np.zeros(config["vocab_size"], bool)
    is_known[known] = True
    tensors = _draw(drafter, random, {"d2t": known - np.arange(len(known)), "t2d": is_known})
    tensors["lm_head.weight"] *= tensors["lm_head.weight"].dtype.type(SPREAD)
    write_checkpoint(folder, tensors, config)
    return folder


def write_assistant(folder: Path, config: dict[str, Any]) -> Path:
    """Its centroids' tokens are in random order."""
    random = np.random.default_rng(4)
    ordering = random.permutation(config["text_config"]["vocab_size"])
    drafter = Gemma4Assistant.from_hf(config, "bfloat16")
    tensors = _draw(drafter, random, {"masked_embedding.token_ordering": ordering})
    write_checkpoint(folder, tensors, config)
    return folder


def add_mtp_head(target: Path, config: Mapping[str, Any]) -> Path:
    """A file of its own in the target's folder, named in the index."""
    drafter = Qwen35MTP.from_hf(config, "bfloat16")
    tensors = _draw(drafter, np.random.default_rng(5), {}, norms=0.0)
    path, index = target / "mtp.safetensors", target / INDEX
    if index.exists():
        content = json.loads(index.read_text())
    else:
        names = dict.fromkeys(TensorStore(target), "model.safetensors")
        content = {"metadata": {}, "weight_map": names}
    save_file(tensors, path, metadata={"format": "pt"})
    content["weight_map"] |= dict.fromkeys(tensors, path.name)
    index.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _draw(
    drafter: Any, random: np.random.Generator, tables: Tensors, *, norms: float = 1.0
) -> Tensors:
    """bf16 values that keep activations near one, the norms' about `norms`; `tables` are given."""
    shape_at = {path: leaf.shape for path, leaf in leaves_with_path(drafter.abstract_params())}
    tensors = dict(tables)
    for rule in drafter.weight_rules():
        if rule.hf in tables:
            continue
        shape = rule.stored(shape_at[rule.path])
        values = random.standard_normal(shape, np.float32)
        values *= 0.1 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
        if len(shape) == 1:
            values += norms
        tensors[rule.hf] = values.astype(ml_dtypes.bfloat16)
    return tensors
