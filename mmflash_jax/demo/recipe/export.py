"""Writes the trained target as an ordinary Hugging Face folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from mmflash_jax.demo.recipe.family import Family
from mmflash_jax.demo.recipe.network import ShapeT

_CLASS_DEFAULTS = frozenset(
    {
        "_name_or_path",
        "chunk_size_feed_forward",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "transformers_version",
    }
)


def write_configuration(
    folder: Path, family: Family[ShapeT], shape: ShapeT, tokenizer: Tokenizer
) -> None:
    """Everything in the folder but the weights and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _without_class_defaults(family.model_config(shape, tokenizer).to_dict())
    _write_json(folder / "config.json", family.published_config(config, shape))
    generation = {
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id(token) for token in family.stop_tokens],
        "pad_token_id": tokenizer.token_to_id(family.marks.pad),
    }
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "preprocessor_config.json", family.preprocessor_config(shape))
    if folder.resolve() != family.folder.resolve():
        shutil.copyfile(family.folder / "chat_template.jinja", folder / "chat_template.jinja")


def _without_class_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without what every transformers class carries, as published ones are."""
    kept = {}
    for key, value in config.items():
        if key in _CLASS_DEFAULTS or value is None:
            continue
        kept[key] = _without_class_defaults(value) if isinstance(value, dict) else value
    return kept


def write_weights(
    folder: Path, weights: Mapping[str, torch.Tensor], float32_suffixes: tuple[str, ...]
) -> None:
    """Write bfloat16 weights; a run that is killed meanwhile leaves the last file whole."""
    stored = {}
    for name, weight in weights.items():
        dtype = torch.float32 if name.endswith(float32_suffixes) else torch.bfloat16
        stored[name] = weight.detach().to("cpu", dtype).contiguous()
    unfinished = folder / "model.safetensors.part"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / "model.safetensors")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
