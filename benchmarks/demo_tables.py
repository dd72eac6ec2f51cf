"""The demo's tables: every draft method on both demo targets, with the same data and compute.

    python -m benchmarks.demo_tables make --folder runs/tables --seeds 0 1 2

makes everything on one device: the target's answers, drafts of every method and seed, and their
measurement on held-out charts, seed by seed. The same command goes on where a stopped one was. The
other commands are its parts, each in a process of its own: several at a time, and none beside the
measurement.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from benchmarks.demo_settings import (
    CONFIGS,
    DRAFTS,
    Settings,
    Target,
    compiled_methods,
    compiled_path,
    draft_path,
    keep_settings,
    prepared_path,
    xla_flags,
)
from benchmarks.jobs import Job, run_jobs, started

log = logging.getLogger(__name__)


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
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Imported here: processes that this one starts to draw charts import this file again.
    from benchmarks import demo_stages as stages

    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {
                "make": make, "prepare": stages.prepare, "compile": stages.compile_method,
                "train": stages.train, "measure": stages.measure, "report": stages.report,
            },
            description=__doc__,
        )  # fmt: skip
    except (ValueError, OSError, FloatingPointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return code if isinstance(code, int) else 0


def make(arguments: tyro.conf.OmitArgPrefixes[Make]) -> int:
    """Make the tables, or go on with them; 1 if a part failed, is missing or failed parity."""
    from benchmarks.demo_stages import collect, report

    began = time.monotonic()
    folder, results = arguments.folder, arguments.results
    keep_settings(folder, arguments.settings)
    results.mkdir(parents=True, exist_ok=True)
    # Not the default, which ends this process and leaves those that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    environment = {"XLA_FLAGS": xla_flags(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    jobs = jobs_of(folder, arguments.targets, arguments.seeds)
    begin = folder / "begin-to-measure"
    begin.unlink(missing_ok=True)
    if not jobs:
        begin.touch()
    with started(_measurement(arguments, begin), folder / "logs", environment) as measurement:
        seconds = run_jobs(
            jobs, at_once=arguments.at_once, logs=folder / "logs", environment=environment,
            until=began + arguments.train_until,
        )  # fmt: skip
        log.info("prepared, compiled and trained after %.0f s", time.monotonic() - began)
        begin.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            measurement.wait(max(0.0, began + arguments.until - time.monotonic()))
    report(folder, results, arguments.commit)
    records = collect(folder, arguments.commit)
    log.info("%d records after %.0f s", len(records), time.monotonic() - began)
    whole = len(seconds) == len(jobs) and measurement.returncode == 0
    return 0 if whole and all(record["parity"] for record in records) else 1


def _measurement(arguments: Make, begin: Path) -> Job:
    flags = ("--commit", arguments.commit) if arguments.commit else ()
    return Job(
        "measure",
        (
            *_command("measure", arguments.folder), "--results", str(arguments.results),
            "--begin", str(begin), *flags, "--targets", *arguments.targets,
            "--seeds", *map(str, arguments.seeds),
        ),
    )  # fmt: skip


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
        for method in compiled_methods(target):
            arguments = (*_command("compile", folder), "--target", target, "--method", method)
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


if __name__ == "__main__":
    sys.exit(main())
