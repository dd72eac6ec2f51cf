"""Time decoding of full-size random checkpoints, drafted and plain, in one run.

    python -m benchmarks.full_size make --family qwen35 --folder /tmp/qwen35
    python -m benchmarks.decode --folder /tmp/qwen35 --tau 5.70 --report decode.json

Loader, step and loop are those that serve. Two things are not real and are labelled so: weights
are random, and **acceptance is synthetic**: how many tokens a step commits is drawn so that the
mean is `tau`, whatever the draft said. Contexts are random keys, values and states.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array

from benchmarks.profile import write_profile
from mmflash_jax.decode.accept import cut
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.records import RUNNING, Acceptance, DecodeState, Plan, Verification
from mmflash_jax.decode.sampling import choose
from mmflash_jax.drafters import NoDraft, Proposal
from mmflash_jax.evaluation.report import describe_device, versions
from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.layers.schema import Params, leaves_with_path
from mmflash_jax.load import default_dtype, load_drafter, load_target
from pallas_kernels import Kernels

# Copying on an H200: bytes read and written a second, measured. Its data sheet says 4.8e12.
BANDWIDTH = 4.3e12
GOLDEN = 0.6180339887


@dataclass(frozen=True)
class Settings:
    """What to time."""

    folder: Path
    """Where `benchmarks.full_size make` wrote target and draft."""
    tau: float = 5.70
    """Mean of the tokens that a drafted step commits."""
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (1024,)
    """Tokens in the caches when timing starts."""
    kernels: tuple[Kernels, ...] = ("auto",)
    drafters: tuple[Literal["dflash", "none"], ...] = ("dflash", "none")
    steps: int = 40
    """Steps of a timed run."""
    runs: int = 3
    report: Path | None = None
    """JSON file; the records of other runs in it stay."""
    profile: Path | None = None
    """Folder for tables of kernels by time, a text file for each cell. Times under the profiler are
    longer and are not reported."""


def quantiles(tau: float, block: int, steps: int = 512) -> np.ndarray:
    """Committed counts `1 .. block` in ascending order, their mean within 1 / steps of `tau`.

    As if every draft agreed with the same probability, independently (Leviathan et al., 2023).
    """
    place = np.arange(block)

    def mean(agree: float) -> float:
        return float(np.sum(agree**place))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < tau else (low, middle)
    # The probability of committing more than k tokens is agree^k.
    above = low**place
    counts = (above[None, :] > (np.arange(steps)[:, None] + 0.5) / steps).sum(axis=1)
    return np.sort(counts).astype(np.int32)


def synthetic(
    counts: tuple[int, ...], state: DecodeState, proposal: Proposal, verification: Verification,
    stop_ids: tuple[int, ...],
) -> Acceptance:  # fmt: skip
    """Commit a drawn number of the target's choices; the draft's ids are compared, and ignored."""
    place = state.num_tokens[:, None] + jnp.arange(verification.logits.shape[1])
    choice = choose(verification.logits, state.sampling, place)
    agreed = jnp.sum(proposal.ids == choice[:, :-1], axis=-1)
    row = jnp.arange(state.steps.shape[0])
    drawn = (state.steps * GOLDEN + row * GOLDEN**2) % 1.0
    table = jnp.asarray(counts, jnp.int32)
    count = table[(drawn * len(counts)).astype(jnp.int32)]
    # Keeps the comparison in the program.
    count = jnp.where(agreed < 0, 0, count)
    return cut(state, choice, count, stop_ids)


@functools.partial(jax.jit, static_argnames=("plan", "batch", "capacity", "room"))
def filled(plan: Plan, batch: int, capacity: int, room: int, context: Array) -> DecodeState:
    """A state as after a prompt of `context` tokens, its caches random."""
    shapes = jax.eval_shape(
        lambda: (
            plan.target.init_cache(batch, capacity, plan.width(batch)),
            plan.drafter.init_state(batch, capacity),
        )
    )
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    values = [
        jnp.zeros(leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer)
        else jax.random.normal(key, leaf.shape, jnp.bfloat16).astype(leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=False)
    ]
    cache, draft = jax.tree.unflatten(structure, values)
    zero = jnp.zeros((batch,), jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((batch, room), jnp.int32), num_tokens=zero + 1, limit=zero + room,
        anchor=zero + 100 + jnp.arange(batch), length=zero + context, rope_shift=zero,
        reason=zero + RUNNING, steps=zero, drafted=jnp.zeros((batch, room), bool),
        committed=jnp.zeros((batch, plan.drafter.block), jnp.int32), cache=cache, draft=draft,
        sampling=None,
    )  # fmt: skip


def _bytes(leaf: Any) -> int:
    """Of an array or of its shape."""
    return leaf.size * leaf.dtype.itemsize


def weight_bytes(plan: Plan, params: Params) -> int:
    """Bytes of weights that a step streams: every matrix once, the output head also for drafts.

    Tables that a step only looks rows up in, and the image tower, do not count.
    """
    total = 0
    for path, leaf in leaves_with_path(params["target"]):
        names = [str(part) for part in path]
        if names[0] == "visual" or names[0] == "embed_tokens_per_layer":
            continue
        if names[0] == "embed_tokens":
            if "lm_head" in params["target"]:
                continue
            total += _bytes(leaf) * (1 if isinstance(plan.drafter, NoDraft) else 2)
        elif names[0] == "lm_head":
            total += _bytes(leaf) * (1 if isinstance(plan.drafter, NoDraft) else 2)
        else:
            total += _bytes(leaf)
    if not isinstance(plan.drafter, NoDraft):
        total += sum(_bytes(leaf) for _, leaf in leaves_with_path(params["drafter"]))
    return total


def context_bytes(plan: Plan, state: DecodeState, context: float) -> int:
    """Bytes of caches that a step must read, and of recurrent states read and written."""

    def of(cache: AttentionCache) -> float:
        slots = cache.k.shape[2]
        return 2 * _bytes(cache.k) * min(context, slots) / slots

    caches = list(state.cache.layers)
    sources = [layer.source for layer in getattr(plan.target.config, "layers", ())]
    if sources:
        # Layers that share keys read them again.
        makers = [index for index, source in enumerate(sources) if source == index]
        caches = [caches[makers.index(source)] for source in sources]
    total = 0.0
    for cache in caches:
        if isinstance(cache, AttentionCache):
            total += of(cache)
        else:
            total += 2 * sum(_bytes(leaf) for leaf in jax.tree.leaves(cache))
    if not isinstance(plan.drafter, NoDraft):
        drafts = zip(state.draft.k, state.draft.v, strict=True)
        total += sum(of(AttentionCache(k=k, v=v)) for k, v in drafts)
    return int(total)


def time_cell(
    settings: Settings, plan: Plan, params: Params, batch: int, context: int
) -> dict[str, Any]:
    """Median step time and tokens a second of one plan, batch and context."""
    most = plan.drafter.block * settings.steps * (settings.runs + 1) + 1
    capacity = -(-(context + most + plan.drafter.block) // 64) * 64
    state = filled(plan, batch, capacity, most, np.int32(context))
    began = time.perf_counter()
    state = jax.block_until_ready(decode(plan, params, state, np.int32(settings.steps)))
    compile_s = time.perf_counter() - began
    seconds, tokens = [], []
    for _ in range(settings.runs):
        before = np.asarray(state.num_tokens).sum()
        began = time.perf_counter()
        state = jax.block_until_ready(decode(plan, params, state, np.int32(settings.steps)))
        seconds.append(time.perf_counter() - began)
        tokens.append(int(np.asarray(state.num_tokens).sum() - before))
    step_s = float(np.median(seconds)) / settings.steps
    average = float(np.asarray(state.length).mean() + context) / 2
    moved = weight_bytes(plan, params) + context_bytes(plan, state, average)
    stats = jax.devices()[0].memory_stats() or {}
    cell = {
        "step_ms": round(1e3 * step_s, 3),
        "tokens_per_s": round(float(np.median(np.array(tokens) / np.array(seconds))), 1),
        "tau": round(float(np.mean(tokens)) / settings.steps / batch, 3),
        "bytes_moved": moved,
        "bandwidth_share": round(moved / step_s / BANDWIDTH, 3),
        "memory_bytes": stats.get("bytes_in_use"),
        "first_run_s": round(compile_s, 1),
        "step_ms_runs": [round(1e3 * s / settings.steps, 3) for s in seconds],
    }
    if settings.profile is not None:
        name = f"{type(plan.drafter).__name__}_{plan.target.kernels}_b{batch}_c{context}.txt"  # type: ignore[attr-defined]
        run = functools.partial(decode, plan, params, state, np.int32(4))
        write_profile(run, settings.profile / name, steps=4)
    return cell


def measure(settings: Settings) -> list[dict[str, Any]]:
    """A record for every cell; each is written as soon as it is known."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    target, drafter, params, loaded = _load(settings.folder)
    print(json.dumps(loaded), flush=True)
    records = []
    if settings.report and settings.report.exists():
        records = json.loads(settings.report.read_text())
    for context in settings.contexts:
        for batch in settings.batches:
            for kernels in settings.kernels:
                record: dict[str, Any] = {
                    "device": describe_device(), "target": type(target).__name__,
                    "drafter": "dflash", "batch": batch, "context": context, "kernels": kernels,
                    "weights": "random", "acceptance": "synthetic", "asked_tau": settings.tau,
                    "versions": versions(), "commit": commit.stdout.strip(), **loaded,
                }  # fmt: skip
                for name in settings.drafters:
                    plan = _plan(target, drafter if name == "dflash" else None, kernels, settings)
                    cell = time_cell(settings, plan, params, batch, context)
                    prefix = "" if name == "dflash" else "plain_"
                    record |= {prefix + key: value for key, value in cell.items()}
                    shown = {"drafter": name, "batch": batch, "context": context, **cell}
                    print(json.dumps({"kernels": kernels, **shown}), flush=True)
                records.append(record)
                if settings.report:
                    settings.report.write_text(json.dumps(records, indent=1) + "\n")
    return records


def _load(folder: Path) -> tuple[Any, Any, Params, dict[str, Any]]:
    """Target, draft, their parameters, and what loading them took."""
    began = time.perf_counter()
    target, target_params = load_target(folder / "target", default_dtype())
    jax.block_until_ready(target_params)
    between = time.perf_counter()
    drafter, draft_params = load_drafter(folder / "draft", target, default_dtype())
    jax.block_until_ready(draft_params)
    stats = jax.devices()[0].memory_stats() or {}
    loaded = {
        "target_load_s": round(between - began, 2),
        "draft_load_s": round(time.perf_counter() - between, 2),
        "target_bytes": sum(_bytes(leaf) for leaf in jax.tree.leaves(target_params)),
        "draft_bytes": sum(_bytes(leaf) for leaf in jax.tree.leaves(draft_params)),
        "loaded_memory_bytes": stats.get("bytes_in_use"),
    }
    return target, drafter, {"target": target_params, "drafter": draft_params}, loaded


def _plan(target: Any, drafter: Any, kernels: Kernels, settings: Settings) -> Plan:
    target = dataclasses.replace(target, kernels=kernels)
    if drafter is None:
        return Plan(target, NoDraft(), ())
    counts = tuple(int(count) for count in quantiles(settings.tau, drafter.block))
    rule = _Rule(counts)
    return Plan(target, dataclasses.replace(drafter, kernels=kernels), (), rule=rule)


@dataclass(frozen=True)
class _Rule:
    """`synthetic` with its counts: hashable, as a plan must be."""

    counts: tuple[int, ...]

    def __call__(self, *arguments: Any) -> Acceptance:
        return synthetic(self.counts, *arguments)


def main() -> int:
    settings = tyro.cli(Settings, description=__doc__)
    measure(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
