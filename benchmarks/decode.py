"""Time decoding of full-size random checkpoints by any method, plain decoding in the same run.

    python -m benchmarks.full_size make --family qwen35 --folder /tmp/qwen35
    python -m benchmarks.decode --folder /tmp/qwen35 --tau 5.70 --drafters all --report decode.json
    python -m benchmarks.decode_report decode.json

Loader, step and loop are those that serve. Two things are not real and are labelled so: weights
are random, and **acceptance is synthetic** (`benchmarks.acceptance`). Contexts are random keys,
values and states.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array

from benchmarks.acceptance import BLOCK, SyntheticRule, agreement, longest, mean_of, quantiles
from benchmarks.methods import FOLDERS, Method, read_methods
from benchmarks.profile import write_profile
from benchmarks.traffic import BANDWIDTH, context_bytes, operations, size_of, weight_bytes
from mmflash_jax.compilation import compile_at_once
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.records import RUNNING, DecodeState, Plan
from mmflash_jax.drafters import DFlash, NoDraft
from mmflash_jax.evaluation.records import commit as commit_here
from mmflash_jax.evaluation.report import describe_device, versions
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import default_dtype, load_drafter, load_target
from pallas_kernels import Kernels

Record = dict[str, Any]
PROFILED = 4
"""Steps under the profiler."""


@dataclass(frozen=True)
class Settings:
    """What to time."""

    folder: Path
    """Where `benchmarks.full_size make` wrote target and drafts."""
    tau: float = 5.70
    """Mean of the tokens that a step of a block of 16 commits. Drafts of the other methods agree
    with the same probability."""
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (1024,)
    """Tokens in the caches when timing starts."""
    kernels: tuple[Kernels, ...] = ("auto",)
    drafters: tuple[str, ...] = ("none", "dflash")
    """Methods (`benchmarks.methods`), such as none, dflash, mtp7, assistant5, eagle3,
    eagle3-tree16; all: those of the model cards."""
    steps: int = 40
    """Steps of a timed run."""
    runs: int = 3
    report: Path | None = None
    """JSON file; the records of other runs in it stay."""
    commit: str | None = None
    """Commit that the records name. Default: that of this checkout."""
    compile_first: bool = True
    """Compile all cells side by side before the first is timed: quicker with many processors."""
    profile: Path | None = None
    """Folder for tables of kernels by time, a text file for each cell; records get launches and the
    time of each stage. Times under the profiler are longer and are no step times. Needs
    XLA_FLAGS=--xla_gpu_enable_command_buffer= : of a CUDA graph the profiler sees one launch."""


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _noise(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Alone in its program: one for all leaves of a state would take longer to compile than the
    step that is timed."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)


def filled(plan: Plan, batch: int, capacity: int, room: int, context: Array | int) -> DecodeState:
    """A state as after a prompt of `context` tokens, its caches random."""
    shapes = jax.eval_shape(
        lambda: (
            plan.target.init_cache(batch, capacity, plan.drafter.block),
            plan.drafter.init_state(batch, capacity),
        )
    )
    leaves, structure = jax.tree.flatten(shapes)
    values = [
        jnp.zeros(leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer)
        else _noise(seed, leaf.shape, str(leaf.dtype))
        for seed, leaf in enumerate(leaves)
    ]
    cache, draft = jax.tree.unflatten(structure, values)

    # Arrays of their own: a loop that is given its state cannot be given one array twice.
    def each(value: int | Array) -> Array:
        return jnp.zeros((batch,), jnp.int32) + value

    return DecodeState(
        tokens=jnp.zeros((batch, room), jnp.int32), num_tokens=each(1), limit=each(room),
        anchor=each(100) + jnp.arange(batch), length=each(context), rope_shift=each(0),
        reason=each(RUNNING), steps=each(0), drafted=jnp.zeros((batch, room), bool),
        committed=jnp.zeros((batch, plan.drafter.block), jnp.int32), cache=cache, draft=draft,
        sampling=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A method at a batch and a context: what one record is about."""

    method: Method
    kernels: Kernels
    batch: int
    context: int
    plan: Plan
    params: Params
    said: Record

    def state(self, settings: Settings) -> DecodeState:
        """What its runs start from, with room for all that they may commit."""
        block = self.plan.drafter.block
        steps = settings.steps * (settings.runs + 1) + PROFILED
        most = block * steps + 1
        capacity = -(-(self.context + most + block) // 64) * 64
        return filled(self.plan, self.batch, capacity, most, self.context)

    def lower(self, settings: Settings) -> jax.stages.Lowered:
        state = jax.eval_shape(lambda: self.state(settings))
        return decode.lower(self.plan, self.params, state, np.int32(settings.steps))


def time_cell(settings: Settings, cell: Cell) -> Record:
    """Median step time and tokens a second."""
    plan, params, batch = cell.plan, cell.params, cell.batch
    state = cell.state(settings)
    began = time.perf_counter()
    state = jax.block_until_ready(decode(plan, params, state, np.int32(settings.steps)))
    first_s = time.perf_counter() - began
    seconds, tokens = [], []
    for _ in range(settings.runs):
        before = np.asarray(state.num_tokens).sum()
        began = time.perf_counter()
        state = jax.block_until_ready(decode(plan, params, state, np.int32(settings.steps)))
        seconds.append(time.perf_counter() - began)
        tokens.append(int(np.asarray(state.num_tokens).sum() - before))
    step_s = float(np.median(seconds)) / settings.steps
    average = float(np.asarray(state.length).mean() + cell.context) / 2
    moved = weight_bytes(plan, params) + context_bytes(plan, state, average)
    stats = jax.devices()[0].memory_stats() or {}
    figures = {
        "step_ms": round(1e3 * step_s, 3),
        "tokens_per_s": round(float(np.median(np.array(tokens) / np.array(seconds))), 1),
        "tau": round(float(np.mean(tokens)) / settings.steps / batch, 3),
        "bytes_moved": moved,
        "operations": _operations(plan, params, state, average),
        "bandwidth_share": round(moved / step_s / BANDWIDTH, 3),
        "memory_bytes": stats.get("bytes_in_use"),
        "first_run_s": round(first_s, 1),
        "step_ms_runs": [round(1e3 * s / settings.steps, 3) for s in seconds],
    }
    if settings.profile is not None:
        name = f"{type(plan.drafter).__name__}{plan.drafter.block}_{plan.target.kernels}"  # type: ignore[attr-defined]
        run = functools.partial(decode, plan, params, state, np.int32(PROFILED))
        path = settings.profile / f"{name}_b{batch}_c{cell.context}.txt"
        figures["profile"] = write_profile(run, path, steps=PROFILED)
    return figures


def _operations(plan: Plan, params: Params, state: DecodeState, context: float) -> int | None:
    """None of a method for which they are not counted."""
    if isinstance(plan.drafter, DFlash | NoDraft):
        return round(operations(plan, params, state, context))
    return None


@dataclass(frozen=True)
class Loaded:
    """A target and the drafts of its methods, with parameters.

    drafts: by kind of method, drafter and parameters; plain decoding has neither.
    facts: what loading took, for the records; the draft's by kind.
    """

    target: Any
    params: Params
    drafts: dict[str, tuple[Any, Params]]
    facts: Record
    draft_facts: dict[str, Record]


def load(settings: Settings) -> tuple[Loaded, list[Method]]:
    """Everything in the folder that the methods need; a draft once for all methods of its kind."""
    folder, dtype = settings.folder, default_dtype()
    began = time.perf_counter()
    target, params = load_target(folder / "target", dtype)
    jax.block_until_ready(params)
    facts = {
        "target_load_s": round(time.perf_counter() - began, 2),
        "target_bytes": sum(size_of(leaf) for leaf in jax.tree.leaves(params)),
    }
    methods = read_methods(settings.drafters, type(target).__name__)
    drafts: dict[str, tuple[Any, Params]] = {"none": (NoDraft(), {})}
    draft_facts: dict[str, Record] = {"none": {}}
    for kind in dict.fromkeys(method.kind for method in methods if method.kind != "none"):
        began = time.perf_counter()
        drafts[kind] = load_drafter(folder / FOLDERS[kind], target, dtype)
        leaves = jax.block_until_ready(jax.tree.leaves(drafts[kind][1]))
        draft_facts[kind] = {
            "draft_load_s": round(time.perf_counter() - began, 2),
            "draft_bytes": sum(size_of(leaf) for leaf in leaves),
        }
    stats = jax.devices()[0].memory_stats() or {}
    facts["loaded_memory_bytes"] = stats.get("bytes_in_use")
    return Loaded(target, params, drafts, facts, draft_facts), methods


def plan_of(
    loaded: Loaded, method: Method, kernels: Kernels, tau: float
) -> tuple[Plan, Params, Record]:
    """What decodes by a method, and what a record says of it."""
    drafter, draft_params = loaded.drafts[method.kind]
    target = dataclasses.replace(loaded.target, kernels=kernels)
    params = {"target": loaded.params, "drafter": draft_params}
    if method.kind == "none":
        return Plan(target, drafter, ()), params, {"block": 1, "most_tau": 1}
    drafter = dataclasses.replace(method.shaped(drafter), kernels=kernels)
    most = longest(drafter)
    asked = mean_of(agreement(tau, BLOCK), most)
    plan = Plan(target, drafter, (), rule=SyntheticRule(quantiles(asked, most)))
    said = {"acceptance": "synthetic", "asked_tau": round(asked, 3)}
    return plan, params, {**said, "block": drafter.block, "most_tau": most}


def measure(settings: Settings) -> list[Record]:
    """A record for every cell; each is written as soon as it is known.

    Those of drafted decoding hold what plain decoding took in the same run, under `plain_`.
    """
    commit = settings.commit or commit_here()
    loaded, methods = load(settings)
    print(json.dumps(loaded.facts), flush=True)
    records: list[Record] = []
    if settings.report and settings.report.exists():
        records = json.loads(settings.report.read_text())
    cells = list(cells_of(settings, loaded, methods))
    if settings.compile_first:
        compile_at_once(functools.partial(cell.lower, settings) for cell in cells)
    plain: Record = {}
    for cell in cells:
        figures = time_cell(settings, cell)
        is_plain = cell.method.kind == "none"
        if is_plain:
            plain = {f"plain_{name}": value for name, value in figures.items()}
        shown = {"drafter": cell.method.name, "batch": cell.batch, "context": cell.context}
        print(json.dumps({"kernels": cell.kernels, **shown, **figures}), flush=True)
        records.append({
            "device": describe_device(), "target": type(loaded.target).__name__, **shown,
            "kernels": cell.kernels, "weights": "random", **cell.said, "versions": versions(),
            "commit": commit, **loaded.facts,
            **loaded.draft_facts[cell.method.kind], **figures, **({} if is_plain else plain),
        })  # fmt: skip
        if settings.report:
            settings.report.parent.mkdir(parents=True, exist_ok=True)
            settings.report.write_text(json.dumps(records, indent=1) + "\n")
    return records


def cells_of(settings: Settings, loaded: Loaded, methods: list[Method]) -> Iterator[Cell]:
    """All cells, plain decoding first in each context, batch and choice of kernels."""
    groups = itertools.product(settings.contexts, settings.batches, settings.kernels)
    for context, batch, kernels in groups:
        for method in methods:
            plan, params, said = plan_of(loaded, method, kernels, settings.tau)
            yield Cell(method, kernels, batch, context, plan, params, said)


def main() -> int:
    settings = tyro.cli(Settings, description=__doc__)
    measure(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
