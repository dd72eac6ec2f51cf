"""Gemma 4's part in the recipe."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmflash_jax.demo.recipe import gemma4_tokenizer as tok
from mmflash_jax.demo.recipe.family import Family, PromptMarks
from mmflash_jax.demo.recipe.gemma4_network import Gemma4Network
from mmflash_jax.demo.recipe.gemma4_shape import (
    EMBEDDER_PREFIX,
    TOWER_PREFIX,
    Gemma4Shape,
    huggingface_config,
    initial_weights,
    published_config,
)

# The smallest budget the family's processor knows; a demo chart fills it without being resized.
_SOFT_TOKENS = 70


def _preprocessor_config(shape: Gemma4Shape) -> dict[str, Any]:
    """Settings of the family's image processor, in its version that needs no torch."""
    return {
        "image_processor_type": "Gemma4ImageProcessorPil",
        "do_convert_rgb": True,
        "do_normalize": False,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": _SOFT_TOKENS,
        "patch_size": shape.patch,
        "pooling_kernel_size": shape.merge,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }


def _picture_inputs(_: Any, outputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    names = ("pixel_values", "image_position_ids")
    inputs = {name: torch.as_tensor(outputs[name]) for name in names}
    (image_tokens,) = outputs["num_soft_tokens_per_image"]
    return inputs, int(image_tokens)


GEMMA4 = Family(
    name="gemma4",
    marks=PromptMarks(
        pad=tok.PAD,
        turn_end=tok.TURN_END,
        image_pad=tok.IMAGE_PAD,
        before_image=f"{tok.BOS}{tok.TURN_START}user\n",
        after_image="",
        after_question=f"{tok.TURN_END}\n{tok.TURN_START}model\n",
        image_open=tok.IMAGE_START,
        image_close=tok.IMAGE_END,
    ),
    stop_tokens=(tok.EOS, tok.TURN_END, tok.TOOL_RESPONSE),
    vision_prefixes=(TOWER_PREFIX, EMBEDDER_PREFIX),
    float32_suffixes=(),
    tokenizer_config=tok.TOKENIZER_CONFIG,
    build_tokenizer=tok.build_tokenizer,
    shape=Gemma4Shape,
    network=Gemma4Network,
    initial_weights=initial_weights,
    model_config=huggingface_config,
    published_config=published_config,
    preprocessor_config=_preprocessor_config,
    picture_inputs=_picture_inputs,
)
