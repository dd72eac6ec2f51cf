"""Where the time of a program goes: its kernels by total time, as text."""

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

Kernel = tuple[str, str]
"""Name of a kernel and the part of the program that it comes from."""
STAGES = ("propose", "verify", "accept", "commit")
"""Named scopes of a decoding step."""


def write_profile(
    run: Callable[[], Any], path: Path, *, steps: int, lines: int = 60
) -> dict[str, Any]:
    """Run under the profiler and write a table: time and launches a step, by kernel.

    Returns launches and microseconds of kernels a step, and how these divide into its stages.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        times, counts = _kernels(Path(folder))
    total, launches = sum(times.values()), sum(counts.values())
    text = [f"{total / steps / 1e3:.1f} us and {launches / steps:.0f} launches a step", ""]
    parts: dict[str, float] = collections.defaultdict(float)
    for (_, part), ns in times.items():
        parts[part] += ns
    text += [f"{ns / steps / 1e3:9.1f} us  {part}" for part, ns in _largest(parts, 20)]
    text.append("")
    for kernel, ns in _largest(times, lines):
        name, part = kernel
        text.append(
            f"{ns / steps / 1e3:9.1f} us {counts[kernel] / steps:6.1f} x "
            f"{ns / counts[kernel] / 1e3:8.2f} us  {name[:70]}  {part}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")
    return {
        "launches": round(launches / steps),
        "kernels_us": round(total / steps / 1e3, 1),
        "stages_us": {part: round(ns / steps / 1e3, 1) for part, ns in _largest(parts, 20)},
    }


def _largest(times: dict[Any, float], count: int) -> list[tuple[Any, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:count]


def _kernels(folder: Path) -> tuple[dict[Kernel, float], dict[Kernel, int]]:
    """Nanoseconds and launches of every kernel on the device."""
    times: dict[Kernel, float] = collections.defaultdict(float)
    counts: dict[Kernel, int] = collections.defaultdict(int)
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if "/device:GPU" not in plane.name:
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    scope = " ".join(str(value) for _, value in event.stats)
                    kernel = (event.name, _part(scope))
                    times[kernel] += event.duration_ns
                    counts[kernel] += 1
    return times, counts


def _part(scope: str) -> str:
    """The stage of the step in the path of named scopes that XLA keeps for an operation."""
    for stage in STAGES:
        if f"/{stage}/" in scope:
            return stage
    return "other"
