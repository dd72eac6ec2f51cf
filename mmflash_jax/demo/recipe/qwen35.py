"""Qwen3.5's part in the recipe."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmflash_jax.demo.recipe import qwen35_tokenizer as tok
from mmflash_jax.demo.recipe.family import Family, PromptMarks
from mmflash_jax.demo.recipe.qwen35_network import Qwen35Network
from mmflash_jax.demo.recipe.qwen35_shape import (
    VISION_PREFIX,
    Qwen35Shape,
    huggingface_config,
    initial_weights,
)

# Areas in pixels, as the family's processor counts them: a demo chart passes unresized.
_SMALLEST_AREA = 64 * 64
_LARGEST_AREA = 320 * 224


def _published_config(config: dict[str, Any], _: Qwen35Shape) -> dict[str, Any]:
    """Older transformers also write a class default that contradicts the rope parameters."""
    text = config["text_config"]
    text = {key: value for key, value in text.items() if key != "partial_rotary_factor"}
    return {**config, "text_config": text}


def _preprocessor_config(shape: Qwen35Shape) -> dict[str, Any]:
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
        "size": {"shortest_edge": _SMALLEST_AREA, "longest_edge": _LARGEST_AREA},
        "temporal_patch_size": shape.temporal_patch,
    }


def _picture_inputs(processor: Any, outputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    inputs = {name: torch.as_tensor(outputs[name]) for name in ("pixel_values", "image_grid_thw")}
    return inputs, int(inputs["image_grid_thw"].prod()) // processor.merge_size**2


QWEN35 = Family(
    name="qwen35",
    marks=PromptMarks(
        pad=tok.PAD,
        turn_end=tok.TURN_END,
        image_pad=tok.IMAGE_PAD,
        before_image=f"{tok.TURN_START}user\n{tok.VISION_START}",
        after_image=tok.VISION_END,
        after_question=(f"{tok.TURN_END}\n{tok.TURN_START}assistant\n<think>\n\n</think>\n\n"),
    ),
    stop_tokens=(tok.TURN_END, tok.PAD),
    vision_prefixes=(VISION_PREFIX,),
    # Stored in float32 by the family's own checkpoints.
    float32_suffixes=("linear_attn.A_log", "linear_attn.norm.weight"),
    tokenizer_config=tok.TOKENIZER_CONFIG,
    build_tokenizer=tok.build_tokenizer,
    shape=Qwen35Shape,
    network=Qwen35Network,
    initial_weights=initial_weights,
    model_config=huggingface_config,
    published_config=_published_config,
    preprocessor_config=_preprocessor_config,
    picture_inputs=_picture_inputs,
)
