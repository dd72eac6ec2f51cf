"""Tiny random Gemma 4 assistants made and run by transformers, fp32."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.tiny_gemma4 import FULL, SLIDING, VOCAB_SIZE, randomise

CENTROIDS, TOP = 24, 5


def tiny_assistant(folder: Path, target: Any, *, seed: int = 0, **changes: Any) -> Any:
    """An assistant for the target with the text config `target`, saved to `folder`.

    `changes` replace fields of the assistant's own config.
    """
    torch.manual_seed(seed)
    fields: dict[str, Any] = dict(  # noqa: C408 - as a config is written
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=0,
        hidden_size=24,
        hidden_size_per_layer_input=0,
        intermediate_size=40,
        num_hidden_layers=3,
        layer_types=[SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3,
        num_attention_heads=2 * target["num_key_value_heads"],
        num_key_value_heads=target["num_key_value_heads"],
        head_dim=16,
        global_head_dim=32,
        sliding_window=target["sliding_window"],
        max_position_embeddings=4096,
        rope_parameters={
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        use_double_wide_mlp=False,
        enable_moe_block=False,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    text = Gemma4TextConfig(**fields)
    own = {
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": True,
        "num_centroids": CENTROIDS,
        "centroid_intermediate_top_k": TOP,
    }
    config = Gemma4AssistantConfig(text_config=text, **{**own, **changes})
    model = Gemma4AssistantForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    randomise(model, seed)
    if model.masked_embedding is not None:
        order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def chain_logits(
    model: Any, table: torch.Tensor, token: int, hidden: torch.Tensor, states: Any, position: int,
    steps: int,
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """Logits `[steps, V]` and ids of one row's greedy chain, as transformers' generator does it.

    `table` has the target's scaled rows; `states` are its keys and values by kind of layer.
    """
    made, ids, hidden = [], [token], hidden[None, None]
    with torch.no_grad():
        for _ in range(steps):
            inputs = torch.cat([table[ids[-1]][None, None], hidden], dim=-1)
            out = model(
                inputs_embeds=inputs, position_ids=torch.tensor([[position]]),
                shared_kv_states=states,
            )  # fmt: skip
            made.append(out.logits[0, 0])
            ids.append(int(made[-1].argmax()))
            hidden = out.last_hidden_state
    return torch.stack(made), ids[1:]
