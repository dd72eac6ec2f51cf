"""Writes the trained target as an ordinary Hugging Face folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from mmflash_jax.demo.recipe import tokenizer as tok
from mmflash_jax.demo.recipe.shape import TargetShape, huggingface_config

SHIPPED_FOLDER = Path(__file__).parents[1] / "qwen35"
# Areas in pixels, as the family's processor counts them: a demo chart passes unresized.
SMALLEST_AREA = 64 * 64
LARGEST_AREA = 320 * 224
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
# Stored in float32 by the family's own checkpoints.
_FLOAT32_SUFFIXES = ("linear_attn.A_log", "linear_attn.norm.weight")


def write_configuration(folder: Path, shape: TargetShape, tokenizer: Tokenizer) -> None:
    """Everything in the folder but the weights and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = huggingface_config(shape, tokenizer).to_dict()
    _write_json(folder / "config.json", _without_class_defaults(config))
    turn_end, pad = tokenizer.token_to_id(tok.TURN_END), tokenizer.token_to_id(tok.PAD)
    generation = {"do_sample": False, "eos_token_id": [turn_end, pad], "pad_token_id": pad}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "preprocessor_config.json", preprocessor_config(shape))
    template = SHIPPED_FOLDER / "chat_template.jinja"
    if folder.resolve() != SHIPPED_FOLDER.resolve():
        shutil.copyfile(template, folder / template.name)


def _without_class_defaults(config: dict) -> dict:
    """The configuration without what every transformers class carries, as published ones are."""
    kept = {}
    for key, value in config.items():
        if key in _CLASS_DEFAULTS or value is None:
            continue
        kept[key] = _without_class_defaults(value) if isinstance(value, dict) else value
    return kept


def preprocessor_config(shape: TargetShape) -> dict:
    """Settings of the family's image processor, in its version that needs no torch."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorPil",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": shape.merge,
        "patch_size": shape.patch,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": SMALLEST_AREA, "longest_edge": LARGEST_AREA},
        "temporal_patch_size": shape.temporal_patch,
    }


def write_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write bfloat16 weights; a run that is killed meanwhile leaves the last file whole."""
    stored = {}
    for name, weight in weights.items():
        dtype = torch.float32 if name.endswith(_FLOAT32_SUFFIXES) else torch.bfloat16
        stored[name] = weight.detach().to("cpu", dtype).contiguous()
    unfinished = folder / "model.safetensors.part"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / "model.safetensors")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
