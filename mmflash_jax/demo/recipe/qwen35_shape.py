"""Sizes of the tiny Qwen3.5, its Hugging Face configuration and its starting weights."""

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5Config

from mmflash_jax.demo.recipe import qwen35_tokenizer as tok
from mmflash_jax.demo.recipe.network import TEXT_PREFIX
from mmflash_jax.demo.recipe.shape import Initialiser, TargetShape

VISION_PREFIX = "model.visual."


@dataclass(frozen=True)
class Qwen35Shape(TargetShape):
    """Sizes of a tiny Qwen3.5 vision-language model; the defaults are what ships."""

    head_width: int = 64
    rotary_width: int = 32
    mrope_section: tuple[int, int, int] = (6, 5, 5)
    rope_theta: float = 10_000.0
    linear_key_heads: int = 4
    linear_value_heads: int = 8
    linear_head_width: int = 32
    conv_taps: int = 4
    full_attention_interval: int = 4
    vision_positions: int = 400
    temporal_patch: int = 2

    @property
    def linear_key_width(self) -> int:
        return self.linear_key_heads * self.linear_head_width

    @property
    def linear_value_width(self) -> int:
        return self.linear_value_heads * self.linear_head_width

    def is_linear(self, layer: int) -> bool:
        """Gated delta-net layers, except every fourth, which is full attention."""
        return (layer + 1) % self.full_attention_interval != 0


def huggingface_config(shape: Qwen35Shape, tokenizer: Tokenizer) -> Qwen3_5Config:
    """The configuration that transformers builds the same model from; every field is explicit."""
    pad, turn_end = tokenizer.token_to_id(tok.PAD), tokenizer.token_to_id(tok.TURN_END)
    text = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "linear_conv_kernel_dim": shape.conv_taps,
        "linear_key_head_dim": shape.linear_head_width,
        "linear_value_head_dim": shape.linear_head_width,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "full_attention_interval": shape.full_attention_interval,
        "layer_types": [
            "linear_attention" if shape.is_linear(layer) else "full_attention"
            for layer in range(shape.layers)
        ],
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_width / shape.head_width,
            "mrope_section": list(shape.mrope_section),
            "mrope_interleaved": True,
        },
        "pad_token_id": pad,
        "eos_token_id": turn_end,
        "bos_token_id": None,
    }
    vision = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_mlp_width,
        "num_heads": shape.vision_heads,
        "patch_size": shape.patch,
        "spatial_merge_size": shape.merge,
        "temporal_patch_size": shape.temporal_patch,
        "out_hidden_size": shape.width,
        "num_position_embeddings": shape.vision_positions,
    }
    return Qwen3_5Config(
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.token_to_id(tok.IMAGE_PAD),
        video_token_id=tokenizer.token_to_id(tok.VIDEO_PAD),
        vision_start_token_id=tokenizer.token_to_id(tok.VISION_START),
        vision_end_token_id=tokenizer.token_to_id(tok.VISION_END),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def initial_weights(shape: Qwen35Shape, seed: int) -> dict[str, torch.Tensor]:
    """Random starting weights under the names that transformers uses."""
    make = Initialiser(seed)
    _initialise_vision(make, shape)
    make.normal(f"{TEXT_PREFIX}embed_tokens.weight", (shape.vocabulary, shape.width), 0.06)
    for layer in range(shape.layers):
        _initialise_text_layer(make, shape, layer)
    make.weights[f"{TEXT_PREFIX}norm.weight"] = torch.zeros(shape.width)
    return make.weights


def _initialise_vision(make: Initialiser, shape: Qwen35Shape) -> None:
    width, prefix = shape.vision_width, VISION_PREFIX
    patch_size = (3, shape.temporal_patch, shape.patch, shape.patch)
    scale = 0.8 / math.sqrt(math.prod(patch_size))
    make.normal(f"{prefix}patch_embed.proj.weight", (width, *patch_size), scale)
    make.weights[f"{prefix}patch_embed.proj.bias"] = torch.zeros(width)
    make.normal(f"{prefix}pos_embed.weight", (shape.vision_positions, width), 0.06)
    for layer in range(shape.vision_layers):
        block = f"{prefix}blocks.{layer}."
        make.layer_norm(f"{block}norm1", width)
        make.layer_norm(f"{block}norm2", width)
        make.linear(f"{block}attn.qkv", 3 * width, width, bias=True)
        make.linear(f"{block}attn.proj", width, width, bias=True)
        make.linear(f"{block}mlp.linear_fc1", shape.vision_mlp_width, width, bias=True)
        make.linear(f"{block}mlp.linear_fc2", width, shape.vision_mlp_width, bias=True)
    merged = width * shape.merge**2
    make.layer_norm(f"{prefix}merger.norm", width)
    make.linear(f"{prefix}merger.linear_fc1", merged, merged, bias=True)
    make.linear(f"{prefix}merger.linear_fc2", shape.width, merged, bias=True)


def _initialise_text_layer(make: Initialiser, shape: Qwen35Shape, layer: int) -> None:
    block, width = f"{TEXT_PREFIX}layers.{layer}.", shape.width
    # Zero-centred norms: the stored weight is added to one.
    make.weights[f"{block}input_layernorm.weight"] = torch.zeros(width)
    make.weights[f"{block}post_attention_layernorm.weight"] = torch.zeros(width)
    if shape.is_linear(layer):
        _initialise_delta_net(make, shape, f"{block}linear_attn.")
    else:
        mixer, kv_width = f"{block}self_attn.", shape.kv_heads * shape.head_width
        query_width = shape.heads * shape.head_width
        make.linear(f"{mixer}q_proj", 2 * query_width, width)
        make.linear(f"{mixer}k_proj", kv_width, width)
        make.linear(f"{mixer}v_proj", kv_width, width)
        make.linear(f"{mixer}o_proj", width, query_width)
        make.weights[f"{mixer}q_norm.weight"] = torch.zeros(shape.head_width)
        make.weights[f"{mixer}k_norm.weight"] = torch.zeros(shape.head_width)
    make.linear(f"{block}mlp.gate_proj", shape.mlp_width, width)
    make.linear(f"{block}mlp.up_proj", shape.mlp_width, width)
    make.linear(f"{block}mlp.down_proj", width, shape.mlp_width)


def _initialise_delta_net(make: Initialiser, shape: Qwen35Shape, mixer: str) -> None:
    heads, width = shape.linear_value_heads, shape.width
    channels = 2 * shape.linear_key_width + shape.linear_value_width
    conv_scale = 0.8 / math.sqrt(shape.conv_taps)
    make.normal(f"{mixer}conv1d.weight", (channels, 1, shape.conv_taps), conv_scale)
    make.linear(f"{mixer}in_proj_qkv", channels, width)
    make.linear(f"{mixer}in_proj_z", shape.linear_value_width, width)
    make.linear(f"{mixer}in_proj_b", heads, width)
    make.linear(f"{mixer}in_proj_a", heads, width)
    make.linear(f"{mixer}out_proj", width, shape.linear_value_width)
    make.weights[f"{mixer}norm.weight"] = torch.ones(shape.linear_head_width)
    # Slow decay as in Mamba (steps of 0.001 to 0.1); the class's own start forgets within two
    # tokens. dt_bias is the inverse softplus of the step.
    step = torch.exp(make.uniform(heads, math.log(1e-3), math.log(0.1)))
    make.weights[f"{mixer}dt_bias"] = step + torch.log(-torch.expm1(-step))
    make.weights[f"{mixer}A_log"] = torch.log(make.uniform(heads, 1.0, 16.0))
