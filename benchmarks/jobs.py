"""Commands that depend on each other, several at a time."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

POLL_S = 0.1
GRACE_S = 5.0
"""Between asking processes to end and ending them."""

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Job:
    """A command of this Python. after: names of jobs that must have succeeded before."""

    name: str
    arguments: tuple[str, ...]
    after: tuple[str, ...] = ()


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    logs: Path,
    environment: Mapping[str, str],
    until: float = float("inf"),
) -> dict[str, float]:
    """Run jobs, the first ones first; returns the seconds of those that succeeded.

    A job that fails is told, and those that need it are left out; the others go on. At `until`, by
    `time.monotonic`, whatever still runs is ended; so it is when this process is interrupted.
    """
    waiting = list(jobs)
    running: dict[str, tuple[Process, float]] = {}
    seconds: dict[str, float] = {}
    with contextlib.ExitStack() as processes:
        while (waiting or running) and time.monotonic() < until:
            for name, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode == 0:
                    seconds[name] = time.monotonic() - began
                    log.info("%s: %.1f s", name, seconds[name])
                else:
                    log.error("%s failed, see %s", name, logs / f"{name}.log")
            pending = {job.name for job in waiting} | running.keys()
            lost = [j for j in waiting if any(n not in seconds.keys() | pending for n in j.after)]
            for job in lost:
                log.error("%s is left out: it needs %s", job.name, " and ".join(job.after))
            waiting = [job for job in waiting if job not in lost]
            for job in [j for j in waiting if all(name in seconds for name in j.after)]:
                if len(running) < at_once:
                    waiting.remove(job)
                    process = processes.enter_context(started(job, logs, environment))
                    running[job.name] = process, time.monotonic()
            time.sleep(POLL_S)
        if waiting or running:
            log.error("out of time: %s", ", ".join([*running, *(job.name for job in waiting)]))
    return seconds


@contextlib.contextmanager
def started(job: Job, logs: Path, environment: Mapping[str, str]) -> Iterator[Process]:
    """The process of a job, which writes into `logs/NAME.log` and does not outlive the context."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{job.name}.log").open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, *job.arguments], stdout=stream, stderr=stream,
            env={**os.environ, **environment},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
