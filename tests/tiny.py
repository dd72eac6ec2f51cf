"""Tiny random checkpoints in Hugging Face layout, for parity tests without a network.

Every parameter gets a value that matters: the library's own initial values (norm weights of zero,
biases of zero) would hide mistakes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

# The first 256 ids are the bytes; the table is padded past the tokenizer, as released ones are.
_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)
TOKEN_IDS = {token: 256 + index for index, token in enumerate(_TOKENS)}
VOCAB_SIZE = 288
IMAGE_PAD_ID = TOKEN_IDS["<|image_pad|>"]

# Areas, as the processor counts them: 4 to 36 tokens an image.
SMALL_IMAGES = {"shortest_edge": 64 * 64, "longest_edge": 192 * 192}
# The limits of the released family: 64 to 16384 tokens an image.
FAMILY_IMAGES = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}

# Behaviour of the family's template: thinking unless told otherwise, contents trimmed, errors for
# no messages, for images outside user turns and for a conversation without a user.
CHAT_TEMPLATE = """\
{%- macro flat(content, role) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type in ("image", "image_url") -%}
{%- if role != "user" -%}{{ raise_exception("Only user messages can hold images.") }}{%- endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if not messages -%}{{ raise_exception("No messages.") }}{%- endif -%}
{%- if not messages | selectattr("role", "equalto", "user") | list -%}
{{ raise_exception("No user message.") }}
{%- endif -%}
{%- for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" + (flat(message.content, message.role) | trim) }}
{{- "<|im_end|>\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|im_start|>assistant\\n<think>\\n" }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ "\\n</think>\\n\\n" }}{%- endif -%}
{%- endif -%}
"""


class Checkpoint(NamedTuple):
    """A folder in Hugging Face layout and the transformers model that was saved there."""

    folder: Path
    model: Any


def tiny_qwen35(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> Qwen3_5ForConditionalGeneration:
    """Write a tiny random Qwen3.5 checkpoint with its front end to `folder`; return its model.

    `text` and `vision` replace fields of the two configurations.
    """
    torch.manual_seed(seed)
    config = _qwen35_config(tied, text or {}, vision or {})
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    randomise(model, seed)
    model.tie_weights()
    model.save_pretrained(folder)
    write_front_end(folder)
    return model


def _qwen35_config(tied: bool, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Qwen3_5Config:
    """Three delta-net layers and one attention layer; key width differs from value width."""
    text_config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": tied,
        "eos_token_id": TOKEN_IDS["<|endoftext|>"],
        **text,
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": text_config["hidden_size"],
        "hidden_act": "gelu_pytorch_tanh",
        **vision,
    }
    return Qwen3_5Config(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=IMAGE_PAD_ID,
        video_token_id=TOKEN_IDS["<|video_pad|>"],
        vision_start_token_id=TOKEN_IDS["<|vision_start|>"],
        vision_end_token_id=TOKEN_IDS["<|vision_end|>"],
        tie_word_embeddings=tied,
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter a random value of a size that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if name.endswith("A_log"):
                spread = torch.rand(parameter.shape, generator=generator)
                parameter.copy_(torch.log(0.05 + 3.95 * spread))
            elif name.endswith("dt_bias"):
                parameter.copy_(0.5 * noise)
            elif name.endswith("linear_attn.norm.weight") or (
                "visual" in name and "norm" in name and name.endswith("weight")
            ):
                parameter.copy_(1.0 + 0.2 * noise)
            elif "norm" in name and name.endswith("weight"):
                # Stored zero-centred: the layer adds one.
                parameter.copy_(0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "conv1d" in name:
                parameter.copy_(0.4 * noise)
            else:
                fan_in = math.prod(parameter.shape[1:]) if "embed" not in name else 1
                parameter.copy_(noise / math.sqrt(fan_in))


def write_front_end(folder: Path, *, size: Mapping[str, int] | None = None) -> None:
    """Write tokenizer, chat template and image processor of the family to `folder`.

    `size` holds the image area limits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen3_5Tokenizer(
        vocab=letters | TOKEN_IDS,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    # As in released files, the marks of reasoning are tokens of their own but not special.
    visible = ("<think>", "</think>")
    special = [token for token in TOKEN_IDS if token not in visible]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(list(visible))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        size=dict(size or SMALL_IMAGES),
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor.save_pretrained(folder)
    # Released files name the base class; the loader picks the backend.
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor_type"] = "Qwen2VLImageProcessor"
    path.write_text(json.dumps(settings, indent=2) + "\n")
