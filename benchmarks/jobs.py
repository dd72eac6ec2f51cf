"""Commands that depend on each other, as many at a time as the machine has cores for."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

POLL_S = 0.1
GRACE_S = 5.0
"""Between asking a process to end and ending it."""


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

    A job that fails is told, and those that need it are left out; the others go on. Each writes
    into `logs/NAME.log`. At `until`, by `time.monotonic`, whatever still runs is ended. So it is
    when this process is interrupted or asked to end.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running = list(jobs), {}
    seconds: dict[str, float] = {}
    with _ended_with_us(running):
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
                    running[job.name] = _start(job, logs, environment), time.monotonic()
            time.sleep(POLL_S)
        if waiting or running:
            log.error("out of time: %s", ", ".join([*running, *(job.name for job in waiting)]))
    return seconds


def _start(job: Job, logs: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (logs / f"{job.name}.log").open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, *job.arguments], stdout=stream, stderr=stream,
            env={**os.environ, **environment},
        )  # fmt: skip


@contextlib.contextmanager
def _ended_with_us(running: dict[str, tuple[subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Ends what still runs, also when SIGTERM ends this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        left = [process for process, _ in running.values()]
        for process in left:
            process.terminate()
        last = time.monotonic() + GRACE_S
        for process in left:
            try:
                process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
