"""Tiny drafts made and run by z-lab's own package, fp32 on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mmflash_jax.drafters import DFlash
from mmflash_jax.layers.schema import Params
from mmflash_jax.weights import TensorStore, import_params

dflash = pytest.importorskip("dflash.model", reason="z-lab's dflash package is not installed")

VOCAB_SIZE, WIDTH, MASK_ID = 288, 32, 280

SLIDING, FULL = "sliding_attention", "full_attention"


def save(folder: Path, *, layers: list[str], own: dict[str, Any], **top: Any) -> Any:
    """A randomised draft of z-lab's class, saved to `folder`; `own` is its `dflash_config`.

    `top` replaces or adds fields of the config's top level.
    """
    fields: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "use_sliding_window": SLIDING in layers,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 1e4,
        "num_target_layers": 32,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": MASK_ID, **own},
    }
    model = dflash.DFlashDraftModel(dflash.Qwen3Config(**{**fields, **top})).eval()
    generator = torch.Generator().manual_seed(len(layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> tuple[DFlash, Params]:
    """Our plan and parameters of a saved draft."""
    config = json.loads((folder / "config.json").read_text())
    drafter = DFlash.from_hf(config, "float32")
    store = TensorStore(folder)
    return drafter, import_params(drafter.weight_rules(), store, drafter.abstract_params())


def logits(
    model: Any, features: np.ndarray, ids: np.ndarray, table: np.ndarray, head: np.ndarray
) -> np.ndarray:
    """Draft logits `[T, V]` of one row: block `ids` right behind the context `features`."""
    length = len(features) + len(ids)
    scale = float(dflash._draft_value(model.config, "input_embedding_scale", 1.0))
    embedded = functional.embedding(torch.from_numpy(ids), torch.from_numpy(table)) * scale
    with torch.no_grad():
        hidden = model(
            target_hidden=torch.from_numpy(features)[None],
            noise_embedding=embedded[None],
            position_ids=torch.arange(length)[None],
        )
        made = model.compute_logits(hidden[0], lambda x: x @ torch.from_numpy(head).T)
    return made.numpy()
