"""Benchmarks in their published layouts, read from local copies, and scored by simple rules."""

from pathlib import Path

from mmflash_jax.evaluation.benchmarks.chart_questions import CHARTQA, CHARXIV, held_out_charts
from mmflash_jax.evaluation.benchmarks.choice_questions import MMBENCH, MMSTAR
from mmflash_jax.evaluation.benchmarks.math_questions import DYNAMATH, MATHVERSE, MATHVISTA
from mmflash_jax.evaluation.benchmarks.question import Question, Style
from mmflash_jax.evaluation.benchmarks.rows import BenchmarkError
from mmflash_jax.evaluation.benchmarks.scoring import is_right

CHARTS = "charts"
"""The demo's held-out charts: drawn when asked for, so without a folder."""

# In the order of the published tables.
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (CHARTQA, CHARXIV, MMSTAR, MMBENCH, DYNAMATH, MATHVISTA, MATHVERSE)
}

__all__ = [
    "BENCHMARKS", "CHARTS", "BenchmarkError", "Question", "Style", "is_right", "read_questions",
    "split_name",
]  # fmt: skip


def split_name(given: str) -> tuple[str, Path | None]:
    """Name and path of `NAME=PATH`, or of the bundled charts' bare name.

    Raises:
        BenchmarkError: no such benchmark, or no path.
    """
    name, _, path = given.partition("=")
    known = {each.casefold(): each for each in (CHARTS, *BENCHMARKS)}
    if name.casefold() not in known:
        raise BenchmarkError(
            f"there is no benchmark {name!r}; known are {', '.join(known.values())}"
        )
    name = known[name.casefold()]
    if (name == CHARTS) == bool(path):
        form = "it is bundled: no path" if path else f"{name}=FOLDER, a local copy of it"
        raise BenchmarkError(f"benchmark {given!r}: expected {form}")
    return name, Path(path).expanduser() if path else None


def read_questions(
    name: str, path: Path | None, *, count: int, seed: int, style: Style
) -> list[Question]:
    """`count` questions of a benchmark, or all that it has, drawn by `seed`.

    Raises:
        BenchmarkError: the copy at `path` is missing, partial or of another layout.
    """
    if path is None:
        return held_out_charts(count, seed)
    return BENCHMARKS[name].read(path, count, seed, style)
