"""Tables of an evaluation, in the shape of the published model cards, from its records alone.

    python -m mmflash_jax.evaluation.tables a/records.jsonl b/records.jsonl --output both

A speed-up stands only where parity held; where it failed the table says "withheld" and a note why.
"""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from mmflash_jax.evaluation.benchmarks import BENCHMARKS, CHARTS
from mmflash_jax.evaluation.records import PLAIN, Record, key
from mmflash_jax.weights.hf_config import ConfigError

WITHHELD = "withheld"
CSV_COLUMNS = (
    "target", "method", "benchmark", "concurrency", "tau", "tokens_per_s", "plain_tokens_per_s",
    "speedup", "parity", "rows_equal", "numeric_ties", "questions", "accuracy",
    "mean_answer_tokens", "mean_prompt_tokens", "block", "draft", "dtype", "kernels", "style",
    "max_tokens", "seed", "repeats", "device", "commit", "withheld",
)  # fmt: skip


def read_records(files: Sequence[Path]) -> list[Record]:
    """Records of all files.

    Raises:
        ConfigError: a file holds none, or two records are of one cell of one target.
    """
    records: list[Record] = []
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        if not lines:
            raise ConfigError(f"{file} holds no records")
        records += lines
    seen: set[tuple[str, ...]] = set()
    for record in records:
        cell = (record["target"], *map(str, key(record)))
        if cell in seen:
            raise ConfigError(f"two records of {' / '.join(cell)}: leave one file out")
        seen.add(cell)
    return records


@dataclass(frozen=True)
class Cells:
    """The records of one target, by method, benchmark and requests in flight; names in order."""

    target: str
    records: dict[tuple[str, str, int], Record]
    methods: tuple[str, ...]
    benchmarks: tuple[str, ...]
    concurrency: tuple[int, ...]

    def over(self, method: str, slots: int) -> list[Record | None]:
        """Of every benchmark, None where there is no record."""
        return [self.records.get((method, name, slots)) for name in self.benchmarks]


def by_target(records: Sequence[Record]) -> list[Cells]:
    """One `Cells` a target, in order of first appearance."""
    made = []
    for target in dict.fromkeys(record["target"] for record in records):
        own = {key(record): record for record in records if record["target"] == target}
        methods = dict.fromkeys(method for method, _, _ in own)
        there = {name for _, name, _ in own}
        made.append(
            Cells(
                target=target,
                records=own,
                methods=tuple(sorted(methods, key=lambda method: method != PLAIN)),
                benchmarks=tuple(name for name in (*BENCHMARKS, CHARTS) if name in there),
                concurrency=tuple(sorted({slots for _, _, slots in own})),
            )
        )
    return made


def mean(records: Sequence[Record | None], field: str) -> float | None:
    """Over benchmarks; None unless every one has a value, since another set is another mean."""
    values = [None if record is None else record[field] for record in records]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def markdown(records: Sequence[Record]) -> str:
    """All tables of all targets."""
    return "\n".join(line for cells in by_target(records) for line in _sections(cells))


def _sections(cells: Cells) -> list[str]:
    first = cells.concurrency[0]
    lines = [f"# {cells.target}", "", *_setting(cells), ""]
    lines += [f"## tau / speed-up, {first} in flight", ""]
    lines += _table("method", cells, [(m, cells.over(m, first)) for m in cells.methods], _tau)
    for method in cells.methods:
        rows = [(str(slots), cells.over(method, slots)) for slots in cells.concurrency]
        lines += [f"## {method}: decoded tokens/s (speed-up)", ""]
        lines += _table("in flight", cells, rows, _speed)
    lines += ["## Accuracy by simple rules, answers equal to plain decoding's", ""]
    rows = [
        (f"{method}, {slots}", cells.over(method, slots))
        for method in cells.methods
        for slots in cells.concurrency
    ]
    lines += _table("method, in flight", cells, rows, _accuracy)
    notes = [
        f"- {record['method']} on {record['benchmark']}, {record['concurrency']} in flight: "
        f"{record['withheld']}"
        for record in cells.records.values()
        if record["withheld"]
    ]
    return lines + (["Speeds are withheld where parity failed:", "", *notes, ""] if notes else [])


def _setting(cells: Cells) -> list[str]:
    """What all cells share; a CPU is named as what it is."""

    def each(field: str) -> str:
        return ", ".join(sorted({str(record[field]) for record in cells.records.values()}))

    lines = [
        f"{each('device')}, {each('dtype')}, kernels {each('kernels')}, commit {each('commit')}; "
        f"greedy, prompt style {each('style')}, at most {each('max_tokens')} tokens an answer, "
        f"{each('questions')} questions of a benchmark (seed {each('seed')}), speeds the median of "
        f"{each('repeats')} passes. tau: tokens a verify step. Speed: decoding alone, without "
        "prefill. Speed-up: over plain decoding in the same run."
    ]
    if "cpu" in each("device").casefold():
        lines += ["", "**Measured on a CPU**: speeds say nothing about accelerators."]
    return lines


def _table(
    corner: str,
    cells: Cells,
    rows: Sequence[tuple[str, list[Record | None]]],
    show: Callable[[Sequence[Record | None]], str],
) -> list[str]:
    """Lines of a table: a column for each benchmark and, for several, one of their average."""
    average = ["average"] if len(cells.benchmarks) > 1 else []
    columns = [corner, *cells.benchmarks, *average]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for title, records in rows:
        shown = [show([record]) for record in records] + [show(records) for _ in average]
        lines.append(f"| {' | '.join([title, *shown])} |")
    return [*lines, ""]


def _tau(records: Sequence[Record | None]) -> str:
    tau = mean(records, "tau")
    return "-" if tau is None else f"{tau:.2f} / {_speedup(records)}"


def _speed(records: Sequence[Record | None]) -> str:
    speed = mean(records, "tokens_per_s")
    if speed is None:
        return _speedup(records)
    return f"{speed:,.0f} ({_speedup(records)})"


def _speedup(records: Sequence[Record | None]) -> str:
    speedup = mean(records, "speedup")
    if speedup is not None:
        return f"{speedup:.2f}"
    return WITHHELD if any(record and record["withheld"] for record in records) else "-"


def _accuracy(records: Sequence[Record | None]) -> str:
    there = [record for record in records if record is not None]
    if len(there) < len(records):
        return "-"
    accuracy = mean(records, "accuracy")
    equal, asked, ties = (
        sum(record[field] for record in there)
        for field in ("rows_equal", "questions", "numeric_ties")
    )
    shown = "-" if accuracy is None else f"{100 * accuracy:.1f} %"
    return f"{shown}, {equal} of {asked}" + (f", {ties} ties" if ties else "")


def write_csv(records: Sequence[Record], file: Path) -> None:
    """One line a record, without lists."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(CSV_COLUMNS)
        writer.writerows([record[name] for name in CSV_COLUMNS] for record in records)


def write_all(records: Sequence[Record], folder: Path) -> str:
    """Tables and plots into `folder`; returns the markdown."""
    # Slow to import, and `--help` needs none of it.
    from mmflash_jax.evaluation.bars import plot_positions, plot_speedup, plot_tau

    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(records)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    write_csv(records, folder / "records.csv")
    for cells in by_target(records):
        name = Path(cells.target).name
        plot_tau(cells, folder / f"{name}_tau.png")
        plot_speedup(cells, folder / f"{name}_speedup.png")
        plot_positions(cells, folder / f"{name}_positions.png")
    return text


def main() -> int:
    def join(files: tyro.conf.Positional[tuple[Path, ...]], output: Path) -> int:
        """Tables and plots of all records files, into the folder `output`."""
        try:
            sys.stdout.write(write_all(read_records(files), output))
        except (ValueError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        return 0

    return tyro.cli(join, description=__doc__, prog="python -m mmflash_jax.evaluation.tables")


if __name__ == "__main__":
    sys.exit(main())
