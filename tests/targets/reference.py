"""The same prompts through transformers, in fp32 on the CPU."""

from typing import Any, NamedTuple

import numpy as np
import torch

from mmflash_jax.decode.records import Prompt
from mmflash_jax.targets import Target


class Loaded(NamedTuple):
    """A target, its parameters, and the transformers model of the same weights."""

    target: Target
    params: Any
    model: Any
    folder: Any


class Reference(NamedTuple):
    """logits `[P, V]`, and the raw output `[P, D]` of every decoder layer."""

    logits: np.ndarray
    layers: list[np.ndarray]


def inputs(model: Any, prompt: Prompt) -> dict[str, torch.Tensor]:
    """Arguments of the transformers model for one prompt."""
    ids = torch.from_numpy(prompt.ids.astype(np.int64))[None]
    # Without a mask `generate` takes every id 0 for padding.
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.images:
        given |= _IMAGES[model.config.model_type](model, prompt)
        given["mm_token_type_ids"] = torch.from_numpy(prompt.media_idx >= 0)[None].int()
    return given


def _qwen35_images(model: Any, prompt: Prompt) -> dict[str, torch.Tensor]:
    patches = np.concatenate([image.patches for image in prompt.images])
    grids = [[1, image.rows, image.columns] for image in prompt.images]
    return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor(grids)}


def _gemma4_images(model: Any, prompt: Prompt) -> dict[str, torch.Tensor]:
    """Padded patches with the (x, y) of each; the order is ours, runs of a pooled token."""
    pool = model.config.vision_config.pooling_kernel_size
    most = max(len(image.patches) for image in prompt.images)
    patches = np.zeros((len(prompt.images), most, prompt.images[0].patches.shape[1]), np.float32)
    places = np.full((len(prompt.images), most, 2), -1)
    for index, image in enumerate(prompt.images):
        grid = np.indices((image.rows, image.columns))[::-1]
        blocks = grid.reshape(2, image.rows // pool, pool, image.columns // pool, pool)
        places[index, : len(image.patches)] = blocks.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        patches[index, : len(image.patches)] = image.patches
    return {
        "pixel_values": torch.from_numpy(patches),
        "image_position_ids": torch.from_numpy(places),
    }


_IMAGES = {"qwen3_5": _qwen35_images, "gemma4": _gemma4_images}


def run(model: Any, prompt: Prompt) -> Reference:
    """One full forward pass. Hooks take layer outputs: the list of hidden states that
    transformers returns holds the last one after the final norm."""
    taken: list[np.ndarray] = []

    def take(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        taken.append(hidden[0].float().numpy().copy())

    layers = model.model.language_model.layers
    hooks = [layer.register_forward_hook(take) for layer in layers]
    with torch.no_grad():
        logits = model(**inputs(model, prompt)).logits[0].float().numpy()
    for hook in hooks:
        hook.remove()
    return Reference(logits, taken)


def generate(model: Any, prompt: Prompt, count: int) -> list[int]:
    """`count` greedily decoded ids."""
    with torch.no_grad():
        ids = model.generate(
            **inputs(model, prompt), do_sample=False, max_new_tokens=count,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return ids[0, len(prompt.ids) :].tolist()
