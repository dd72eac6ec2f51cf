"""Load and decode full-size random checkpoints: does everything fit, and how long does a step take?

    python -m benchmarks.full_size make --folder /tmp/full
    python -m benchmarks.full_size measure --folder /tmp/full --report full_size.json

`make` writes a random Qwen3.5-4B-shaped checkpoint and a random draft of the published size with
`save_pretrained` (needs torch, transformers and z-lab's `dflash`). `measure` loads both with our
loader and decodes. Weights are random: step times are real, acceptance and text mean nothing.
"""

import dataclasses
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

TEXT = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
}
DRAFT = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "num_target_layers": 32,
    "block_size": 16,
    "max_position_embeddings": 262144,
    "layer_types": ["full_attention"] * 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
}
DRAFT_PARAMETERS = 537_427_200


@dataclass(frozen=True)
class Make:
    """Write the two random checkpoints."""

    folder: Path
    layers: int = 32
    """Target layers; fewer make a quick trial of this script."""
    device: str = "cuda"
    """Where torch draws the weights."""


@dataclass(frozen=True)
class Measure:
    """Load and decode them, and report."""

    folder: Path
    batches: tuple[int, ...] = (1, 8)
    context: int = 1024
    """Prompt tokens of a row."""
    steps: int = 50
    """Timed verify steps."""
    report: Path | None = None


def make(arguments: Make) -> None:
    import torch
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3Config

    torch.set_default_dtype(torch.bfloat16)
    types = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(32)]
    text = {**TEXT, "num_hidden_layers": arguments.layers, "layer_types": types[: arguments.layers]}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    with torch.device(arguments.device):
        target = Qwen3_5ForConditionalGeneration(config)
    target.save_pretrained(arguments.folder / "target", max_shard_size="4GB")
    del target
    draft_config = {**DRAFT, "num_target_layers": arguments.layers}
    if arguments.layers < 32:
        ids = [min(i, arguments.layers - 1) for i in range(5)]
        draft_config["dflash_config"] = {"mask_token_id": 248070, "target_layer_ids": ids}
    with torch.device(arguments.device):
        draft = DFlashDraftModel(Qwen3Config(**draft_config))
    count = sum(parameter.numel() for parameter in draft.parameters())
    assert count == DRAFT_PARAMETERS, f"the draft has {count:,} parameters"
    draft.save_pretrained(arguments.folder / "draft")


def measure(arguments: Measure) -> dict[str, Any]:
    import jax
    import numpy as np

    from mmflash_jax.decode.loop import decode
    from mmflash_jax.decode.prefill import prefill
    from mmflash_jax.decode.records import Plan
    from mmflash_jax.drafters import NoDraft
    from mmflash_jax.evaluation.report import describe_device, versions
    from mmflash_jax.load import default_dtype, load_drafter, load_target

    commit = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(commit, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {
        "device": describe_device(),
        "versions": versions(),
        "commit": head.stdout.strip(),
        "weights": "random",
        "context": arguments.context,
        "runs": [],
    }
    began = time.perf_counter()
    target, params = load_target(arguments.folder / "target", default_dtype())
    jax.block_until_ready(params)
    result["target_load_s"] = round(time.perf_counter() - began, 2)
    began = time.perf_counter()
    drafter, draft_params = load_drafter(arguments.folder / "draft", target, default_dtype())
    jax.block_until_ready(draft_params)
    result["draft_load_s"] = round(time.perf_counter() - began, 2)
    everything = {"target": params, "drafter": draft_params}
    result["target_bytes"] = sum(x.nbytes for x in jax.tree.leaves(params))
    result["draft_bytes"] = sum(x.nbytes for x in jax.tree.leaves(draft_params))
    result["draft_parameters"] = sum(x.size for x in jax.tree.leaves(draft_params))
    print(json.dumps(result), flush=True)
    warm, capacity = 5, arguments.context + 16 * (arguments.steps + 16)
    capacity = -(-capacity // 64) * 64
    for batch in arguments.batches:
        prompts = [_prompt(target, arguments.context, row, capacity) for row in range(batch)]
        for name, plan in (
            ("dflash", Plan(target, drafter, ())),
            ("none", Plan(target, NoDraft(), ())),
        ):
            began = time.perf_counter()
            state = prefill(plan, everything, prompts, capacity=capacity)
            state = jax.block_until_ready(decode(plan, everything, state, np.int32(warm)))
            first_s = time.perf_counter() - began
            began = time.perf_counter()
            state = prefill(plan, everything, prompts, capacity=capacity)
            jax.block_until_ready(state)
            prefill_s = time.perf_counter() - began
            times = []
            for _ in range(3):
                began = time.perf_counter()
                state = decode(plan, everything, state, np.int32(arguments.steps // 3))
                jax.block_until_ready(state)
                times.append((time.perf_counter() - began) / (arguments.steps // 3))
            stats = jax.devices()[0].memory_stats() or {}
            run = {
                "drafter": name,
                "batch": batch,
                "step_ms": round(1000 * float(np.median(times)), 3),
                "prefill_ms": round(1000 * prefill_s, 1),
                "first_call_s": round(first_s, 1),
                "tokens": int(np.asarray(state.num_tokens).sum()),
                "peak_memory_bytes": stats.get("peak_bytes_in_use"),
            }
            del state
            result["runs"].append(run)
            print(json.dumps(run), flush=True)
            if arguments.report:
                arguments.report.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _prompt(target: Any, length: int, seed: int, capacity: int) -> Any:
    """Random text around one 256 x 256 picture of noise."""
    import numpy as np

    from mmflash_jax.decode.records import PatchedImage, Prompt

    rng = np.random.default_rng(seed)
    image = PatchedImage(
        patches=rng.normal(size=(256, 3 * 2 * 16 * 16)).astype(np.float32),
        rows=16,
        columns=16,
        num_tokens=64,
    )
    ids = rng.integers(0, 248000, length).astype(np.int32)
    ids[8:72] = target.config.image_token_id
    positions, shift = target.prompt_positions(ids, [(8, 8)])
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
    arguments = tyro.cli(Make | Measure, description=__doc__)  # pyright: ignore[reportArgumentType]
    if isinstance(arguments, Make):
        began = time.perf_counter()
        make(arguments)
        print(f"written in {time.perf_counter() - began:.1f} s to {arguments.folder}")
    else:
        fields = dataclasses.asdict(arguments)
        print({name: str(value) for name, value in fields.items()}, flush=True)
        measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
