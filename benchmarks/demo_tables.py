"""The demo's tables: every draft method on both demo targets, with the same data and compute.

    python -m benchmarks.demo_tables make --folder runs/tables --seeds 0 1 2

makes everything on one device: the target's answers, drafts of every method and seed, and their
measurement on held-out charts, seed by seed. The same command goes on where a stopped one was. The
other commands are its parts; each runs in a process of its own, several at a time, but for the
measurement, which has the machine to itself.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import tyro

from benchmarks.compile_ahead import compile_ahead
from benchmarks.demo_settings import (
    CONFIGS,
    DRAFTS,
    METHODS,
    Settings,
    Target,
    compiled_path,
    draft_path,
    evaluate_config,
    keep_settings,
    methods_of,
    prepared_path,
    train_config,
    xla_flags,
)
from benchmarks.demo_tables_report import collect, markdown, plot, write_records
from benchmarks.jobs import Job, run_jobs
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


@dataclass(frozen=True)
class Make:
    """Makes the tables, or goes on with them."""

    folder: Path = Path("runs/demo_tables")
    """Everything on the way. One set of settings a folder."""
    results: Path = Path("benchmarks/results")
    """Folder for tables.json, rewritten after every number in flight, tables.md and pictures."""
    targets: tuple[Target, ...] = ("demo", "demo-gemma4")
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of initial drafts, batches and anchors. Whole seeds come first."""
    settings: Settings = field(default_factory=Settings)
    at_once: int = max(1, (os.cpu_count() or 1) // 2)
    """Processes that prepare, compile and train side by side."""
    train_until: float = 300.0
    """Seconds after the start when training ends. Drafts that are not whole then are left out."""
    until: float = 480.0
    """Seconds after the start when everything ends."""
    commit: str | None = None
    """Commit that is run. Default: what git says."""


def main() -> int:
    # Imports have set up logging of their own by now.
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", force=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {
                "make": make, "prepare": prepare, "compile": compile_method, "train": train,
                "measure": measure, "report": report,
            },
            description=__doc__,
        )  # fmt: skip
    except (ValueError, OSError, FloatingPointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return code if isinstance(code, int) else 0


def make(arguments: tyro.conf.OmitArgPrefixes[Make]) -> int:
    """Make the tables, or go on with them; 1 if a part failed, is missing or failed parity."""
    began = time.monotonic()
    folder, results = arguments.folder, arguments.results
    keep_settings(folder, arguments.settings)
    results.mkdir(parents=True, exist_ok=True)
    environment = {"XLA_FLAGS": xla_flags()}
    jobs = jobs_of(folder, arguments.targets, arguments.seeds)
    seconds = run_jobs(
        jobs, at_once=arguments.at_once, logs=folder / "logs",
        environment={**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        until=began + arguments.train_until,
    )  # fmt: skip
    log = logging.getLogger(__name__)
    log.info("prepared, compiled and trained after %.0f s", time.monotonic() - began)
    flags = ("--commit", arguments.commit) if arguments.commit else ()
    names = [*arguments.targets], [str(seed) for seed in arguments.seeds]
    measured = Job(
        "measure",
        (*_command("measure", folder), "--results", str(results), *flags,
         "--targets", *names[0], "--seeds", *names[1]),
    )  # fmt: skip
    last = run_jobs(
        [measured], at_once=1, logs=folder / "logs", environment=environment,
        until=began + arguments.until,
    )  # fmt: skip
    report(folder, results, arguments.commit)
    records = collect(folder, arguments.commit)
    log.info("%d records after %.0f s", len(records), time.monotonic() - began)
    whole = len(seconds) == len(jobs) and last
    return 0 if whole and all(record["parity"] for record in records) else 1


def jobs_of(folder: Path, targets: Sequence[Target], seeds: Sequence[int]) -> list[Job]:
    """What lacks before all drafts can be measured, in the order in which to begin it."""
    jobs: list[Job] = []

    def add(name: str, done: bool, arguments: tuple[str, ...], *after: str) -> None:
        if not done:
            there = tuple(name for name in after if any(job.name == name for job in jobs))
            jobs.append(Job(name, arguments, there))

    for target in targets:
        arguments = (*_command("prepare", folder), "--target", target)
        add(f"prepare-{target}", prepared_path(folder, target).exists(), arguments)
    for target in targets:
        for method in (PLAIN, *methods_of(target)):
            arguments = (*_command("compile", folder), "--target", target, "--method", method)
            # Another token weight is no other program.
            if method != "mmflash":
                done = compiled_path(folder, target, method).exists()
                add(f"compile-{target}-{method}", done, arguments)
    for seed in seeds:
        for target in targets:
            for kind in CONFIGS[target]:
                paths = [draft_path(folder, target, draft, seed) for draft in DRAFTS[kind]]
                arguments = (
                    *_command("train", folder), "--target", target, "--kind", kind,
                    "--seed", str(seed),
                )  # fmt: skip
                done = all(path.exists() for path in paths)
                add(f"train-{target}-{kind}-{seed}", done, arguments, f"prepare-{target}")
    return jobs


def _command(name: str, folder: Path) -> tuple[str, ...]:
    return "-m", "benchmarks.demo_tables", name, "--folder", str(folder)


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
    done = compiled_path(folder, target, method)
    done.parent.mkdir(parents=True, exist_ok=True)
    drafts, config = {}, None
    if method != PLAIN:
        config = train_config(folder, target, METHODS[method][0])
        drafts = {method: done.with_name(f"{method}-untrained")}
    compile_ahead(evaluate_config(folder, target, drafts, done.parent), drafts, config)
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
) -> None:
    """Measure all drafts that are there, seed by seed, and rewrite tables.json after each number
    in flight."""
    _keep_all_programs()

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


def report(folder: Path, results: Path, commit: str | None = None) -> None:
    """Write tables.json, tables.md and pictures of what is measured so far."""
    records = collect(folder, commit)
    if records:
        write_records(records, results / "tables.json")
        text = markdown(records)
        (results / "tables.md").write_text(text, encoding="utf-8")
        plot(records, results)
        sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
