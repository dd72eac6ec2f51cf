"""Full-size random checkpoints: write them, and hold our logits against transformers'.

    python -m benchmarks.full_size make --family gemma4 --folder /tmp/full
    python -m benchmarks.full_size compare --folder /tmp/full --dtype bfloat16

`make` writes a random checkpoint of Qwen3.5-4B's or Gemma-4-E4B's shape and a random draft of the
published size with `save_pretrained` (needs torch, transformers and z-lab's `dflash`). `compare`
holds the target's logits against transformers'. `benchmarks.decode` times decoding with them.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import shapes

DRAFT_PARAMETERS = 537_427_200


@dataclass(frozen=True)
class Make:
    """Write the two random checkpoints."""

    folder: Path
    family: Literal["qwen35", "gemma4"] = "qwen35"
    layers: int | None = None
    """Target layers; fewer make a quick trial of this script. Default: as published."""
    device: str = "cuda"
    """Where torch draws the weights."""


@dataclass(frozen=True)
class Compare:
    """Hold the target's logits against those of transformers, both in `dtype`."""

    folder: Path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    length: int = 256
    """Prompt tokens, an image among them."""
    device: str = "cuda"
    """Where transformers runs."""
    report: Path | None = None


def make(arguments: Make) -> None:
    import torch
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        target = _FAMILIES[arguments.family](arguments.layers)
        _widen_clip_bounds(target)
    target.save_pretrained(arguments.folder / "target", max_shard_size="4GB")
    layers = target.config.text_config.num_hidden_layers
    del target
    config = dict(shapes.QWEN35_DRAFT if arguments.family == "qwen35" else shapes.GEMMA4_DRAFT)
    if layers != config["num_target_layers"]:
        ids = [min(i, layers - 1) for i in range(5)]
        config["num_target_layers"] = layers
        config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": ids}
    with torch.device(arguments.device):
        draft = DFlashDraftModel(Qwen3Config(**config))
    count = sum(parameter.numel() for parameter in draft.parameters())
    assert count == DRAFT_PARAMETERS, f"the draft has {count:,} parameters"
    draft.save_pretrained(arguments.folder / "draft")


def _qwen35(layers: int | None) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    count = layers or shapes.QWEN35_TEXT["num_hidden_layers"]
    kinds = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
    text = {**shapes.QWEN35_TEXT, "num_hidden_layers": count, "layer_types": kinds}
    config = Qwen3_5Config(
        text_config=text, vision_config=shapes.QWEN35_VISION, tie_word_embeddings=True
    )
    return Qwen3_5ForConditionalGeneration(config)


def _gemma4(layers: int | None) -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = dict(shapes.GEMMA4_TEXT)
    if layers is not None:
        text |= {"num_hidden_layers": layers, "num_kv_shared_layers": layers // 2}
    count = text["num_hidden_layers"]
    kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    config = Gemma4Config(
        text_config={**text, "layer_types": kinds},
        vision_config=shapes.GEMMA4_VISION,
        audio_config=None,
        tie_word_embeddings=True,
    )
    return Gemma4ForConditionalGeneration(config)


_FAMILIES: dict[str, Callable[[int | None], Any]] = {"qwen35": _qwen35, "gemma4": _gemma4}


def _widen_clip_bounds(target: Any) -> None:
    """Finite bounds for clipped projections: the library starts them at infinity."""
    for name, value in target.named_buffers():
        if name.endswith(("input_min", "output_min")):
            value.fill_(-8.0)
        elif name.endswith(("input_max", "output_max")):
            value.fill_(8.0)


def compare(arguments: Compare) -> dict[str, Any]:
    """Largest difference as a share of the largest logit, and the share of equal best ids."""
    import numpy as np
    import torch
    import transformers

    from mmflash_jax.decode.prefill import encode_media, pad_prompts
    from mmflash_jax.decode.records import Plan
    from mmflash_jax.drafters import NoDraft
    from mmflash_jax.load import load_target

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    target, params = load_target(arguments.folder / "target", arguments.dtype)
    prompt = _prompt(target, arguments.length, 0, arguments.length + 1)
    plan, everything = Plan(target, NoDraft(), ()), {"target": params}
    media, first_row = encode_media(plan, everything, [prompt])
    ids, media_idx, positions = pad_prompts(plan, [prompt], first_row, arguments.length)
    ours = _all_logits(target, params, ids, media, media_idx, positions)
    del params, everything, media
    name = json.loads((arguments.folder / "target" / "config.json").read_text())["architectures"][0]
    family = getattr(transformers, name)
    model = family.from_pretrained(
        arguments.folder / "target",
        dtype=getattr(torch, arguments.dtype),
        attn_implementation="eager",
    )
    model = model.eval().to(arguments.device)
    inputs = {
        key: torch.as_tensor(value).to(arguments.device)
        for key, value in _reference_inputs(model.config.model_type, target, prompt).items()
    }
    with torch.no_grad():
        theirs = model(**inputs).logits[0].float().cpu().numpy()
    result = {
        "dtype": arguments.dtype,
        "layers": target.config.num_hidden_layers,
        "tokens": arguments.length,
        "error_of_scale": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        "mean_error_of_scale": float(np.abs(ours - theirs).mean() / np.abs(theirs).max()),
        "same_best_id": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }
    print(json.dumps(result), flush=True)
    if arguments.report:
        arguments.report.write_text(json.dumps(result, indent=2) + "\n")
    return result


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


def _prompt(target: Any, length: int, seed: int, capacity: int) -> Any:
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
    ids = rng.integers(16, 240000, length).astype(np.int32)
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
