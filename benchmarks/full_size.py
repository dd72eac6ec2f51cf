"""Full-size random checkpoints: write them, and hold our logits against transformers'.

    python -m benchmarks.full_size make --family gemma4 --folder /tmp/full
    python -m benchmarks.full_size compare --folder /tmp/full --dtype bfloat16

`make` writes a random checkpoint of Qwen3.5-4B's or Gemma-4-E4B's shape and a random DFlash draft
of the published size with `save_pretrained` (needs torch, transformers and z-lab's `dflash`), and
beside them the family's other drafts (`benchmarks.random_drafts`). `compare` holds the target's
logits against those of transformers in fp32. `benchmarks.decode` times decoding with them. Weights
are random: acceptance and text mean nothing.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import shapes
from benchmarks.random_drafts import write_drafts

DRAFT_PARAMETERS = 537_427_200
Family = Literal["qwen35", "gemma4"]
ARCHITECTURES: dict[Family, str] = {
    "qwen35": "Qwen3_5ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
}


@dataclass(frozen=True)
class Make:
    """Write random checkpoints of a target and its drafts."""

    folder: Path
    family: Family = "qwen35"
    layers: int | None = None
    """Target layers; fewer make a quick trial of this script. Default: as published."""
    device: str = "cuda"
    """Where torch draws the weights."""


@dataclass(frozen=True)
class Compare:
    """Hold the target's logits in `dtype` against those of transformers in fp32.

    In bf16 transformers' own bf16 logits are held against them too: that is the error to expect.
    """

    folder: Path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    length: int = 256
    """Prompt tokens, an image among them."""
    device: str = "cuda"
    """Where transformers runs."""
    report: Path | None = None


def make(arguments: Make) -> None:
    import torch
    import transformers
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    torch.set_default_dtype(torch.bfloat16)
    family, layers = arguments.family, arguments.layers
    with torch.device(arguments.device):
        target = getattr(transformers, ARCHITECTURES[family])(target_config(family, layers))
    if family == "gemma4":
        _temper(target)
    target.save_pretrained(arguments.folder / "target", max_shard_size="4GB")
    del target
    with torch.device(arguments.device):
        draft = DFlashDraftModel(Qwen3Config(**draft_config(family, layers)))
    count = sum(parameter.numel() for parameter in draft.parameters())
    assert count == DRAFT_PARAMETERS, f"the draft has {count:,} parameters"
    draft.save_pretrained(arguments.folder / "draft")
    del draft
    began = time.perf_counter()
    write_drafts(arguments.folder)
    print(f"other drafts written in {time.perf_counter() - began:.1f} s")


def target_config(family: Family, layers: int | None = None) -> Any:
    """The configuration in transformers, with as many layers as published or with fewer."""
    if family == "qwen35":
        from transformers import Qwen3_5Config

        count = layers or shapes.QWEN35_TEXT["num_hidden_layers"]
        kinds = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
        text = {**shapes.QWEN35_TEXT, "num_hidden_layers": count, "layer_types": kinds}
        return Qwen3_5Config(
            text_config=text, vision_config=shapes.QWEN35_VISION, tie_word_embeddings=True
        )
    from transformers import Gemma4Config

    text = dict(shapes.GEMMA4_TEXT)
    if layers is not None:
        text |= {"num_hidden_layers": layers, "num_kv_shared_layers": layers // 2}
    count = text["num_hidden_layers"]
    kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    return Gemma4Config(
        text_config={**text, "layer_types": kinds},
        vision_config=shapes.GEMMA4_VISION,
        audio_config=None,
        tie_word_embeddings=True,
    )


def draft_config(family: Family, layers: int | None = None) -> dict[str, Any]:
    """z-lab's configuration of the published draft, for a target of `layers` layers."""
    config = dict(shapes.QWEN35_DRAFT if family == "qwen35" else shapes.GEMMA4_DRAFT)
    if layers not in (None, config["num_target_layers"]):
        ids = [min(i, layers - 1) for i in range(5)]
        config["num_target_layers"] = layers
        config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": ids}
    return config


def _temper(target: Any) -> None:
    """Norms, scalars and clip bounds of the order of trained ones, drawn anew.

    Attention of scale 1.0 over normed queries and keys of width 256 or 512 has logits of spread 16
    and more if the norms are one: every layer then picks single keys, and 42 of them magnify
    rounding until logits of two dtypes have nothing in common.
    """
    import torch

    for name, value in (*target.named_parameters(), *target.named_buffers()):
        kind = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
        if kind in ("input_min", "output_min"):
            torch.nn.init.constant_(value, -8.0)
        elif kind in ("input_max", "output_max"):
            torch.nn.init.constant_(value, 8.0)
        elif kind == "layer_scalar":
            torch.nn.init.uniform_(value, 0.9, 1.0)
        elif kind == "q_norm":
            typical = value.shape[-1] ** -0.5
            torch.nn.init.uniform_(value, 0.75 * typical, 1.25 * typical)
        elif kind.startswith("post_") and kind.endswith("norm"):
            torch.nn.init.uniform_(value, 0.1, 0.3)
        elif kind.endswith("norm"):
            torch.nn.init.uniform_(value, 0.75, 1.25)


def compare(arguments: Compare) -> dict[str, Any]:
    """Errors as shares of the largest logit, and the shares of equal best ids."""
    import numpy as np

    from mmflash_jax.decode.prefill import encode_media, pad_prompts
    from mmflash_jax.decode.records import Plan
    from mmflash_jax.drafters import NoDraft
    from mmflash_jax.load import load_target

    target, params = load_target(arguments.folder / "target", arguments.dtype)
    prompt = random_prompt(target, arguments.length, 0, arguments.length + 1)
    plan, everything = Plan(target, NoDraft(), ()), {"target": params}
    media, first_row = encode_media(plan, everything, [prompt])
    ids, media_idx, positions = pad_prompts(plan, [prompt], first_row, arguments.length)
    logits = {"ours": _all_logits(target, params, ids, media, media_idx, positions)}
    del params, everything, media
    truth = _transformers_logits(arguments, target, prompt, "float32")
    if arguments.dtype != "float32":
        logits["transformers"] = _transformers_logits(arguments, target, prompt, arguments.dtype)
    result: dict[str, Any] = {
        "dtype": arguments.dtype,
        "layers": target.config.num_hidden_layers,
        "tokens": arguments.length,
    }
    for name, found in logits.items():
        error = np.abs(found - truth) / np.abs(truth).max()
        result[name] = {
            "error_of_scale": float(error.max()),
            "mean_error_of_scale": float(error.mean()),
            "same_best_id": float((found.argmax(-1) == truth.argmax(-1)).mean()),
        }
    print(json.dumps(result), flush=True)
    if arguments.report:
        arguments.report.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _transformers_logits(arguments: Compare, target: Any, prompt: Any, dtype: str) -> Any:
    """fp32 copy of the logits `[T, V]` that transformers computes in `dtype`."""
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = arguments.folder / "target"
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    model = model.eval().to(arguments.device)
    inputs = {
        key: torch.as_tensor(value).to(arguments.device)
        for key, value in _reference_inputs(model.config.model_type, target, prompt).items()
    }
    with torch.no_grad():
        return model(**inputs).logits[0].float().cpu().numpy()


def _all_logits(
    target: Any, params: Any, ids: Any, media: Any, media_idx: Any, positions: Any
) -> Any:
    """fp32 logits `[T, V]` of one prompt in one pass."""
    import jax
    import numpy as np

    @jax.jit
    def run(params: Any) -> Any:
        length = np.zeros(1, np.int32)
        count = np.full(1, ids.shape[1], np.int32)
        x = target.embed(params, ids, media, media_idx)
        cache = target.init_cache(1, ids.shape[1], 1)
        out = target.prefill(params, x, positions, cache, length, count, capture=())
        return target.logits(params, out.hidden)[0]

    return np.asarray(run(params))


def _reference_inputs(family: str, target: Any, prompt: Any) -> dict[str, Any]:
    """What transformers takes for a prompt with one image."""
    import numpy as np

    (image,) = prompt.images
    given: dict[str, Any] = {
        "input_ids": prompt.ids.astype(np.int64)[None],
        "mm_token_type_ids": (prompt.media_idx >= 0).astype(np.int32)[None],
    }
    if family == "qwen3_5":
        grid = np.array([[1, image.rows, image.columns]])
        return {**given, "pixel_values": image.patches, "image_grid_thw": grid}
    side = target.image_side
    places = np.indices((image.rows, image.columns))[::-1]
    blocks = places.reshape(2, image.rows // side, side, image.columns // side, side)
    places = blocks.transpose(1, 3, 2, 4, 0).reshape(1, -1, 2)
    return {**given, "pixel_values": image.patches[None], "image_position_ids": places}


def random_prompt(target: Any, length: int, seed: int, capacity: int) -> Any:
    """Random text around one picture of noise, 16 or so patches a side."""
    import numpy as np

    from mmflash_jax.decode.records import PatchedImage, Prompt

    rng = np.random.default_rng(seed)
    side = target.image_side
    rows = 16 // side * side
    tokens = (rows // side) ** 2
    image = PatchedImage(
        patches=rng.uniform(size=(rows**2, target.config.vision.patch_values)).astype(np.float32),
        rows=rows,
        columns=rows,
        num_tokens=tokens,
    )
    ids = rng.integers(target.config.vocab_size, size=length).astype(np.int32)
    ids[ids == target.config.image_token_id] = 0
    ids[8 : 8 + tokens] = target.config.image_token_id
    positions, shift = target.prompt_positions(ids, [(rows // side, rows // side)])
    is_media = ids == target.config.image_token_id
    return Prompt(
        ids=ids,
        media_idx=np.where(is_media, np.cumsum(is_media) - 1, -1).astype(np.int32),
        positions=positions,
        rope_shift=shift,
        images=(image,),
        max_tokens=capacity - length,
    )


def main() -> int:
    commands: Any = Make | Compare
    arguments = tyro.cli(commands, description=__doc__)
    if isinstance(arguments, Make):
        began = time.perf_counter()
        make(arguments)
        print(f"written in {time.perf_counter() - began:.1f} s to {arguments.folder}")
    else:
        compare(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
