"""One training step at full size: time, memory, and the share of the chip's matrix rate.

    python -m benchmarks.full_size make --folder /tmp/full
    python -m benchmarks.train_step --folder /tmp/full --report train_step.json

Runs the trainer's own step (features online, loss, gradients, AdamW) on rows of 3,072 tokens with
512 anchors, over the random target of `full_size make` and a fresh draft of that folder's shape.
Operations are counted by hand (`count_operations`), without what the backward pass computes anew;
the matrix rate to hold them against is measured in the same run.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.full_size import random_prompt
from mmflash_jax.config_train import ObjectiveConfig, OptimiserConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.evaluation.report import describe_device, versions
from mmflash_jax.load import default_dtype, load_drafter, load_target
from mmflash_jax.training.data import Batch, collate, make_row
from mmflash_jax.training.step import (
    METRICS,
    Recipe,
    make_optimiser,
    make_state,
    target_states,
    train_step,
)
from mmflash_jax.training.trainer import media_features
from pallas_kernels import Kernels


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    folder: Path
    """Folder with `target` and `draft`, as `full_size make` writes it."""
    rows: tuple[int, ...] = (1, 4)
    """Rows of a step; one line of the report each."""
    row_length: int = 3072
    prompt: int = 1024
    """Tokens of a row before its answer, an image among them."""
    anchors: int = 512
    chunk: int | None = None
    loss: Literal["ce", "kl"] = "ce"
    kernels: Kernels = "reference"
    """Of the draft's attention."""
    steps: int = 5
    """Timed steps; the median counts."""
    report: Path | None = None


def main(arguments: Arguments) -> None:
    target, target_params = load_target(arguments.folder / "target", default_dtype())
    drafter, _ = load_drafter(arguments.folder / "draft", target, default_dtype())
    assert isinstance(drafter, DFlash)
    drafter = dataclasses.replace(drafter, kernels=arguments.kernels)
    plan = Plan(target, drafter, ())
    objective = ObjectiveConfig(
        anchors=arguments.anchors, loss=arguments.loss, chunk=arguments.chunk
    )
    recipe = Recipe(plan, make_optimiser(OptimiserConfig()), objective)
    figures: dict[str, Any] = {
        "device": describe_device(),
        "versions": versions(),
        "weights": "random",
        "row_length": arguments.row_length,
        "anchors": arguments.anchors,
        "loss": arguments.loss,
        "kernels": arguments.kernels,
        "matrix_tflops": matrix_rate() / 1e12,
        "runs": [],
    }
    # One state for all runs: steps give its memory on from one to the next.
    state = make_state(recipe, dataclasses.replace(drafter, dtype="float32").init_params(0))
    for rows in arguments.rows:
        batch = jax.device_put(random_batch(plan, target_params, arguments, rows))
        forward = functools.partial(jax.jit(functools.partial(target_states, plan)), target_params)
        run: dict[str, Any] = {"rows": rows}
        run["target_ms"] = 1000 * _seconds(functools.partial(forward, batch), arguments.steps)
        times, metrics = [], {}
        for _ in range(arguments.steps + 1):
            began = time.perf_counter()
            state, metrics = train_step(recipe, target_params, state, batch)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - began)
        run["first_step_s"] = times[0]
        step_s = float(np.median(times[1:]))
        operations = count_operations(plan, target_params, state.params, arguments, rows)
        stats = jax.devices()[0].memory_stats() or {}
        run |= {
            "step_ms": 1000 * step_s,
            "tokens_per_s": rows * arguments.row_length / step_s,
            "operations": operations,
            "share_of_matrix_rate": sum(operations.values()) / step_s / 1e12
            / figures["matrix_tflops"],
            "peak_memory_bytes": stats.get("peak_bytes_in_use"),
            **{name: float(metrics[name]) for name in METRICS},
        }  # fmt: skip
        figures["runs"].append(run)
        print(json.dumps(run), flush=True)
        if arguments.report:
            arguments.report.write_text(json.dumps(figures, indent=2) + "\n")


def random_batch(plan: Plan, target_params: Any, arguments: Arguments, rows: int) -> Batch:
    """Rows of random tokens, an image in each prompt."""
    length = arguments.row_length
    prompts = [random_prompt(plan.target, arguments.prompt, seed, length) for seed in range(rows)]
    rng = np.random.default_rng(0)
    answers = rng.integers(16, plan.target.config.vocab_size // 2, (rows, length)).tolist()
    made = [
        make_row(prompt, media, answer, length)
        for prompt, media, answer in zip(
            prompts, media_features(plan, target_params, prompts), answers, strict=True
        )
    ]
    return collate([row for row in made if row is not None], length)


def count_operations(
    plan: Plan, target_params: Any, draft_params: Any, arguments: Arguments, rows: int
) -> dict[str, float]:
    """Multiplications and additions of one step that no way of computing it could leave out.

    target: matrix products of one forward pass, attention scores left out (a few per cent).
    draft: three passes' worth (forward, and two in the backward pass), over the context for what
    makes keys and values of it, over the blocks for the rest. attention: the visible half of the
    context. head: forward, and the gradient of its input; the head itself is frozen.
    """
    drafter = plan.drafter
    assert isinstance(drafter, DFlash)
    c = drafter.config
    tokens = rows * arguments.row_length
    slots = rows * arguments.anchors * drafter.block
    table = plan.target.config.vocab_size * plan.target.config.hidden_size
    body = _sizes(target_params, lambda path: not path.startswith(("['visual']", "['embed_")))
    kv = 2 * len(c.layers) * c.hidden_size * c.num_key_value_heads * c.head_dim
    fc = len(c.target_layer_ids) * c.target_hidden_size * c.hidden_size
    blocks = _sizes(draft_params, lambda _: True) - fc
    width = c.num_attention_heads * c.head_dim
    visible = slots * len(c.layers) * (arguments.prompt + arguments.row_length) / 2
    head = rows * arguments.anchors * (drafter.block - 1) * table
    return {
        "target": 2.0 * tokens * body,
        "draft": 6.0 * (tokens * (fc + kv) + slots * blocks),
        "attention": 3 * 4.0 * visible * width,
        "head": 4.0 * head * (1.5 if arguments.loss == "kl" else 1),
    }


def _sizes(params: Any, keep: Callable[[str], bool]) -> int:
    """Elements of all matrices whose path is kept."""
    leaves: Iterable[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(params)
    return sum(x.size for path, x in leaves if x.ndim >= 2 and keep(jax.tree_util.keystr(path)))


def matrix_rate(side: int = 8192) -> float:
    """Operations a second of a large bf16 product of random matrices."""
    if jax.default_backend() == "cpu":
        side = 512
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    return 2 * side**3 / _seconds(lambda: jnp.matmul(a, b), 20)


def _seconds(call: Callable[[], Any], times: int) -> float:
    """Median seconds of a call after a first one that compiles."""
    jax.block_until_ready(call())
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
