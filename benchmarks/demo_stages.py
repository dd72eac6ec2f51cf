"""The stages of the demo's tables; each is a command of `benchmarks.demo_tables`."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.compile_ahead import compile_ahead, write_untrained
from benchmarks.demo_settings import (
    DRAFTS,
    METHODS,
    Target,
    compiled_methods,
    compiled_path,
    draft_path,
    evaluate_config,
    methods_of,
    prepared_path,
    train_config,
    untrained_path,
)
from benchmarks.demo_tables_report import collect, markdown, plot, write_records
from benchmarks.lockstep import Lockstep
from benchmarks.prepared import Loaded, Prepared, prepare_rows
from mmflash_jax.compilation import keep_compiled_programs
from mmflash_jax.evaluation.harness import evaluate
from mmflash_jax.evaluation.records import PLAIN, Record
from mmflash_jax.load import default_dtype
from mmflash_jax.training.export import write_draft
from mmflash_jax.training.step import METRICS

SCORE_BATCH = 64
"""Rows scored at once."""
POLL_S = 0.5


def prepare(folder: Path, target: Target) -> None:
    """Let the target answer the prompts and score the answers, once for all drafts."""
    keep_compiled_programs()
    config = train_config(folder, target, "dflash")
    config.output.mkdir(parents=True, exist_ok=True)
    prepared, _ = prepare_rows(Loaded.of(target, default_dtype()), config, ("blank",), SCORE_BATCH)
    prepared.write(prepared_path(folder, target))


def train(folder: Path, target: Target, kind: str, seed: int) -> None:
    """Train the drafts of a kind with one seed, in lockstep."""
    keep_compiled_programs()
    prepared = Prepared.read(prepared_path(folder, target))
    config = train_config(folder, target, kind)
    lockstep = Lockstep.of(prepared, config, list(DRAFTS[kind].values()))
    began = time.perf_counter()
    made, metrics = lockstep.train(seed)
    for index, (draft, weights) in enumerate(DRAFTS[kind].items()):
        facts = {
            "lambda": weights.strength,
            "steps": config.optimiser.steps,
            "batch": config.optimiser.batch,
            "training_prompts": len(prepared.answers),
            "train": {name: float(metrics[name][index]) for name in METRICS},
            "train_s_beside_others": time.perf_counter() - began,
        }
        params = jax.tree.map(lambda x, i=index: x[i], made)
        path = draft_path(folder, target, draft, seed)
        _write(path, lockstep.recipe.plan.drafter, params, facts)


def _write(path: Path, drafter: Any, params: Any, facts: dict[str, Any]) -> None:
    """The draft as it ships, and how it was made. A folder that is there is whole."""
    if path.exists():
        return
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    write_draft(part, drafter, params)
    (part / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    part.rename(path)


def compile_method(folder: Path, target: Target, method: str) -> None:
    """Compile what measuring a method runs, while others train: with an untrained draft."""
    _keep_all_programs()
    drafts = {}
    if method != PLAIN:
        drafts[method] = untrained_path(folder, target, method)
        write_untrained(train_config(folder, target, METHODS[method][0]), drafts[method])
    compile_ahead(evaluate_config(folder, target, drafts, folder), [method])
    done = compiled_path(folder, target, method)
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()


def _keep_all_programs() -> None:
    """Also those that compile in no time: there are many."""
    keep_compiled_programs()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def measure(
    folder: Path,
    results: Path,
    targets: tuple[Target, ...] = ("demo", "demo-gemma4"),
    seeds: tuple[int, ...] = (0, 1, 2),
    commit: str | None = None,
    begin: Path | None = None,
) -> None:
    """Measure all drafts that are there, seed by seed, and rewrite tables.json after each number
    in flight. Waits for a file `begin`, if named, and makes its programs ready until then."""
    _keep_all_programs()
    if begin is not None:
        _make_ready(folder, targets, begin)

    def tell(_: list[Record]) -> None:
        write_records(collect(folder, commit), results / "tables.json")

    for seed in seeds:
        for target in targets:
            paths = {
                method: draft_path(folder, target, METHODS[method][1], seed)
                for method in methods_of(target)
            }
            there = {method: path for method, path in paths.items() if path.exists()}
            if there:
                output = folder / target / "evaluation" / str(seed)
                evaluate(evaluate_config(folder, target, there, output), tell)


def _make_ready(folder: Path, targets: Sequence[Target], begin: Path) -> None:
    """Trace and load the programs of each target when they are compiled, unless `begin` is there.

    That takes longer than to run them, and needs no trained draft.
    """
    for target in targets:
        methods = compiled_methods(target)
        paths = [compiled_path(folder, target, method) for method in methods]
        _wait_until(lambda paths=paths: begin.exists() or all(path.exists() for path in paths))
        if not begin.exists():
            drafts = {m: untrained_path(folder, target, m) for m in methods if m != PLAIN}
            compile_ahead(evaluate_config(folder, target, drafts, folder), methods)
    _wait_until(begin.exists)


def _wait_until(holds: Callable[[], bool]) -> None:
    parent = os.getppid()
    while not holds():
        if os.getppid() != parent:
            sys.exit("the process that started this one has ended")
        time.sleep(POLL_S)


def report(folder: Path, results: Path, commit: str | None = None) -> None:
    """Write tables.json, tables.md and pictures of what is measured so far."""
    records = collect(folder, commit)
    if records:
        write_records(records, results / "tables.json")
        text = markdown(records)
        (results / "tables.md").write_text(text, encoding="utf-8")
        plot(records, results)
        sys.stdout.write(text)
