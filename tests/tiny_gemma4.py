"""Tiny random Gemma 4 checkpoints in Hugging Face layout, for parity tests without a network.

Layer scalars, norms and clip bounds are random too: at the library's initial values (1, 1 and
infinity) a missing one would not show.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

VOCAB_SIZE = 288
# Above the bytes, as in the other tiny checkpoints.
IMAGE_ID, BOI_ID, EOI_ID, AUDIO_ID, VIDEO_ID, BOA_ID, EOA_ID = range(260, 267)
SLIDING, FULL = "sliding_attention", "full_attention"


def tiny_gemma4(
    folder: Path,
    *,
    seed: int = 0,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> Gemma4ForConditionalGeneration:
    """Write a tiny random Gemma 4 checkpoint to `folder`; return its model.

    `text` and `vision` replace fields of the two configurations.
    """
    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(_config(text or {}, vision or {})).eval()
    model.set_attn_implementation("eager")
    randomise(model, seed)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def _config(text: Mapping[str, Any], vision: Mapping[str, Any]) -> Gemma4Config:
    """Sliding and full layers, the last three reading earlier keys; a window under the prompts."""
    text_config = {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "max_position_embeddings": 4096,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        **text,
    }
    vision_config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "use_clipped_linears": True,
        "standardize": False,
        **vision,
    }
    return Gemma4Config(
        text_config=text_config,
        vision_config=vision_config,
        audio_config=None,
        image_token_id=IMAGE_ID,
        boi_token_id=BOI_ID,
        eoi_token_id=EOI_ID,
        audio_token_id=AUDIO_ID,
        boa_token_id=BOA_ID,
        eoa_token_index=EOA_ID,
        video_token_id=VIDEO_ID,
        tie_word_embeddings=True,
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter and stored buffer a random value that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, shape: torch.Size) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            if name.endswith(("input_max", "output_max")):
                value.copy_(uniform(1.0, 2.5, value.shape))
            elif name.endswith(("input_min", "output_min")):
                value.copy_(uniform(-2.5, -1.0, value.shape))
            elif name.endswith("layer_scalar"):
                # Small, as in released weights, so that late layers weigh as much as early ones.
                value.copy_(uniform(0.4, 0.9, value.shape))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                # Scores have no other scale; wide ones would magnify rounding in the softmax.
                value.copy_(uniform(0.2, 0.5, value.shape))
            elif "language_model" in name and ".post_" in name:
                # What a layer adds outweighs the embedding: a tied model would repeat its input.
                value.copy_(uniform(1.0, 3.0, value.shape))
            elif "norm" in name:
                value.copy_(uniform(0.5, 1.5, value.shape))
            else:
                noise = torch.randn(value.shape, generator=generator)
                is_table = "position_embedding_table" in name
                value.copy_(0.3 * noise if is_table else noise / math.sqrt(value.shape[-1]))
