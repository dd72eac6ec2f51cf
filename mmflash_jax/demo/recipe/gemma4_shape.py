"""Sizes of the tiny Gemma 4, its Hugging Face configuration and its starting weights."""

import math
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from transformers import Gemma4Config

from mmflash_jax.demo.recipe import gemma4_tokenizer as tok
from mmflash_jax.demo.recipe.network import TEXT_PREFIX
from mmflash_jax.demo.recipe.shape import Initialiser, TargetShape

TOWER_PREFIX = "model.vision_tower."
EMBEDDER_PREFIX = "model.embed_vision."
CLIP_NAMES = ("input_min", "input_max", "output_min", "output_max")
VISION_LINEARS = tuple(
    [f"self_attn.{name}_proj" for name in "qkvo"]
    + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
)


@dataclass(frozen=True)
class Gemma4Shape(TargetShape):
    """Sizes of a tiny Gemma 4 with everything that the family's small models have.

    The last `kv_shared_layers` have no keys and values: they use those of the last layer of their
    sort before them. Images see no later token, as in the small models.
    """

    mlp_width: int = 512
    head_width: int = 32
    global_head_width: int = 64
    full_layers: tuple[int, ...] = (2, 5, 7)
    kv_shared_layers: int = 2
    window: int = 96
    sliding_theta: float = 10_000.0
    full_theta: float = 1_000_000.0
    full_rotary_share: float = 0.25
    per_layer_width: int = 32
    softcap: float = 30.0
    vision_positions: int = 140  # patches along the longest strip that the image processor makes
    vision_theta: float = 100.0
    # Loose: after the tower's warm-up the largest activation that is clipped is about 11.
    clip_bound: float = 32.0

    @property
    def vision_head_width(self) -> int:
        return self.vision_width // self.vision_heads

    def is_full(self, layer: int) -> bool:
        return layer in self.full_layers

    def head_width_of(self, layer: int) -> int:
        return self.global_head_width if self.is_full(layer) else self.head_width

    def owns_keys(self, layer: int) -> bool:
        return layer < self.layers - self.kv_shared_layers

    def rope_parameters(self) -> dict[str, dict[str, Any]]:
        full = {"rope_type": "proportional", "partial_rotary_factor": self.full_rotary_share}
        return {
            "sliding_attention": {"rope_type": "default", "rope_theta": self.sliding_theta},
            "full_attention": {**full, "rope_theta": self.full_theta},
        }


def huggingface_config(shape: Gemma4Shape, tokenizer: Tokenizer) -> Gemma4Config:
    """The configuration that transformers builds the same model from; every field is explicit."""
    text = {
        "vocab_size": shape.vocabulary,
        "vocab_size_per_layer_input": shape.vocabulary,
        "hidden_size": shape.width,
        "hidden_size_per_layer_input": shape.per_layer_width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "layer_types": [
            "full_attention" if shape.is_full(layer) else "sliding_attention"
            for layer in range(shape.layers)
        ],
        "num_kv_shared_layers": shape.kv_shared_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "global_head_dim": shape.global_head_width,
        "sliding_window": shape.window,
        "max_position_embeddings": 4096,
        "final_logit_softcapping": shape.softcap,
        "rope_parameters": shape.rope_parameters(),
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.token_to_id(tok.PAD),
        "bos_token_id": tokenizer.token_to_id(tok.BOS),
        "eos_token_id": tokenizer.token_to_id(tok.EOS),
    }
    vision = {
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_mlp_width,
        "num_hidden_layers": shape.vision_layers,
        "num_attention_heads": shape.vision_heads,
        "num_key_value_heads": shape.vision_heads,
        "head_dim": shape.vision_head_width,
        "patch_size": shape.patch,
        "pooling_kernel_size": shape.merge,
        "position_embedding_size": shape.vision_positions,
        "rope_parameters": _vision_rope(shape),
        "use_clipped_linears": True,
        "standardize": False,
    }
    return Gemma4Config(
        architectures=["Gemma4ForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=tokenizer.token_to_id(tok.IMAGE_PAD),
        boi_token_id=tokenizer.token_to_id(tok.IMAGE_START),
        eoi_token_id=tokenizer.token_to_id(tok.IMAGE_END),
        audio_token_id=tokenizer.token_to_id(tok.AUDIO_PAD),
        boa_token_id=tokenizer.token_to_id(tok.AUDIO_START),
        eoa_token_index=tokenizer.token_to_id(tok.AUDIO_END),
        video_token_id=tokenizer.token_to_id(tok.VIDEO_PAD),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def published_config(config: dict[str, Any], shape: Gemma4Shape) -> dict[str, Any]:
    """As the family's checkpoints spell it, which old and new versions of transformers read.

    New versions write a map of single layers' head widths, and another name for the tower's rope.
    """
    text = {key: value for key, value in config["text_config"].items() if key != "per_layer_config"}
    text["global_head_dim"] = shape.global_head_width
    vision = {**config["vision_config"], "rope_parameters": _vision_rope(shape)}
    return {**config, "audio_config": None, "text_config": text, "vision_config": vision}


def _vision_rope(shape: Gemma4Shape) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": shape.vision_theta}


def initial_weights(shape: Gemma4Shape, seed: int) -> dict[str, Tensor]:
    """Random starting weights under the names that transformers uses."""
    make = Initialiser(seed)
    _initialise_vision(make, shape)
    make.normal(f"{TEXT_PREFIX}embed_tokens.weight", (shape.vocabulary, shape.width), 0.06)
    per_layer = shape.layers * shape.per_layer_width
    # Looked-up rows are multiplied by the square root of the width of one layer's part.
    scale = 0.8 / math.sqrt(shape.per_layer_width)
    make.normal(f"{TEXT_PREFIX}embed_tokens_per_layer.weight", (shape.vocabulary, per_layer), scale)
    make.linear(f"{TEXT_PREFIX}per_layer_model_projection", per_layer, shape.width)
    _ones(make, f"{TEXT_PREFIX}per_layer_projection_norm", shape.per_layer_width)
    for layer in range(shape.layers):
        _initialise_text_layer(make, shape, layer)
    _ones(make, f"{TEXT_PREFIX}norm", shape.width)
    return make.weights


def _ones(make: Initialiser, norm: str, width: int) -> None:
    make.constant(f"{norm}.weight", (width,), 1.0)


def _head_norms(make: Initialiser, mixer: str, width: int, names: str) -> None:
    """Attention is not scaled, so the norms of queries and keys start with the scale in them."""
    for name in names:
        make.constant(f"{mixer}{name}_norm.weight", (width,), width**-0.25)


def _sandwich_norms(make: Initialiser, block: str, width: int) -> None:
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        _ones(make, f"{block}{name}_layernorm", width)


def _initialise_vision(make: Initialiser, shape: Gemma4Shape) -> None:
    width, mlp_width = shape.vision_width, shape.vision_mlp_width
    make.linear(f"{TOWER_PREFIX}patch_embedder.input_proj", width, 3 * shape.patch**2)
    make.normal(
        f"{TOWER_PREFIX}patch_embedder.position_embedding_table",
        (2, shape.vision_positions, width),
        0.2,
    )
    for layer in range(shape.vision_layers):
        block = f"{TOWER_PREFIX}encoder.layers.{layer}."
        _sandwich_norms(make, block, width)
        _head_norms(make, f"{block}self_attn.", shape.vision_head_width, "qk")
        for name in VISION_LINEARS:
            out_width = mlp_width if "gate" in name or "up" in name else width
            in_width = mlp_width if "down" in name else width
            make.linear(f"{block}{name}.linear", out_width, in_width)
            for bound in CLIP_NAMES:
                sign = 1 if bound.endswith("max") else -1
                make.constant(f"{block}{name}.{bound}", (), sign * shape.clip_bound)
    make.linear(f"{EMBEDDER_PREFIX}embedding_projection", shape.width, width)


def _initialise_text_layer(make: Initialiser, shape: Gemma4Shape, layer: int) -> None:
    block, width = f"{TEXT_PREFIX}layers.{layer}.", shape.width
    mixer, head_width = f"{block}self_attn.", shape.head_width_of(layer)
    _sandwich_norms(make, block, width)
    make.linear(f"{mixer}q_proj", shape.heads * head_width, width)
    make.linear(f"{mixer}o_proj", width, shape.heads * head_width)
    _head_norms(make, mixer, head_width, "q")
    if shape.owns_keys(layer):
        make.linear(f"{mixer}k_proj", shape.kv_heads * head_width, width)
        make.linear(f"{mixer}v_proj", shape.kv_heads * head_width, width)
        _head_norms(make, mixer, head_width, "k")
    make.linear(f"{block}mlp.gate_proj", shape.mlp_width, width)
    make.linear(f"{block}mlp.up_proj", shape.mlp_width, width)
    make.linear(f"{block}mlp.down_proj", width, shape.mlp_width)
    make.linear(f"{block}per_layer_input_gate", shape.per_layer_width, width)
    make.linear(f"{block}per_layer_projection", width, shape.per_layer_width)
    _ones(make, f"{block}post_per_layer_input_norm", width)
    make.constant(f"{block}layer_scalar", (1,), 1.0)
