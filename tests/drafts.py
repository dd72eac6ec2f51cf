"""Random DFlash drafts, written to disk by the exporter that training uses, and a small target."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.drafters import Anchor, Context, DFlash
from mmflash_jax.layers.schema import Params
from mmflash_jax.weights import export_params, write_checkpoint
from tests import tiny


def two_layer_target(folder: Path) -> Path:
    """A target of one layer of each kind, quick to compile.

    It has a head of its own: with a tied one a random target repeats its last token for ever.
    """
    layers = ["linear_attention", "full_attention"]
    tiny.tiny_qwen35(
        folder, tied=False, text={"num_hidden_layers": len(layers), "layer_types": layers}
    )
    return folder


def draft_for(target_folder: Path, **changes: Any) -> DFlash:
    """A small fp32 draft plan that fits the target in `target_folder`.

    `changes` replace fields of its `config.json`; those of `dflash_config` go there.
    """
    target = json.loads((target_folder / "config.json").read_text())["text_config"]
    layers = target["num_hidden_layers"]
    ids = sorted({0, layers // 2, layers - 1})
    own: dict[str, Any] = {"target_layer_ids": ids, "mask_token_id": 9, "block_size": 16}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "vocab_size": target["vocab_size"],
        "num_target_layers": layers,
        "dflash_config": own,
    }
    for name, value in changes.items():
        (own if name in own else config)[name] = value
    return DFlash.from_hf(config, "float32")


def context_of(features: Any, length: Any, count: Any) -> Context:
    """What a draft takes in that reads features alone; positions are plain indices."""
    features, length = jnp.asarray(features), jnp.asarray(length)
    index = length[:, None] + jnp.arange(features.shape[1])
    rows = jnp.zeros((*index.shape, 1))
    return Context(
        features=features, rows=rows, positions=index[None], length=length, count=jnp.asarray(count)
    )


def anchor_of(ids: Any, length: Any) -> Anchor:
    """Anchors of rows whose rotary positions are plain indices."""
    length = jnp.asarray(length)
    return Anchor(ids=jnp.asarray(ids), length=length, positions=length[None])


def random_params(drafter: Any, seed: int = 0) -> Params:
    """Values of a size that keeps activations near one; norms differ from their default."""
    random = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = random.standard_normal(leaf.shape, np.float32)
        values = 1 + 0.2 * noise if leaf.ndim == 1 else noise / np.sqrt(leaf.shape[0])
        return jax.numpy.asarray(values, leaf.dtype)

    return jax.tree.map(draw, drafter.abstract_params())


def write_draft(folder: Path, drafter: DFlash, params: Mapping[Any, Any]) -> Path:
    """Export as training does: bf16 tensors and z-lab's config layout."""
    tensors = export_params(drafter.weight_rules(), dict(params))
    write_checkpoint(folder, tensors, drafter.config.to_hf())
    return folder


def random_draft(folder: Path, target_folder: Path, **changes: Any) -> Path:
    """A folder with a random draft for the target; it guesses wrong nearly always."""
    drafter = draft_for(target_folder, **changes)
    return write_draft(folder, drafter, random_params(drafter))
