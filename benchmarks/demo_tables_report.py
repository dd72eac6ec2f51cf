"""The demo's records as one list, tables with mean and spread over seeds, and pictures."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo_settings import CONFIGS, settings_of
from benchmarks.mmflash_report import spread
from mmflash_jax.evaluation.records import PLAIN, Record
from mmflash_jax.evaluation.tables import WITHHELD, Cells, by_target

FIRST = (
    "target", "method", "benchmark", "concurrency", "tau", "tokens_per_s", "speedup", "parity",
    "seed", "draft_parameters",
)  # fmt: skip
"""Fields that a record begins with."""

Groups = dict[tuple[str, int], list[Record]]


def collect(folder: Path, commit: str | None) -> list[Record]:
    """Records of all cells measured so far, with what is known of their drafts' training."""
    _, flags = settings_of(folder)
    return [
        _joined(folder, target, int(file.parent.name), line, flags, commit)
        for target in CONFIGS
        for file in sorted((folder / target / "evaluation").glob("*/records.jsonl"))
        for line in _lines(file)
    ]


def _lines(file: Path) -> Iterator[Record]:
    """Records of a file that may be in the middle of being written."""
    return map(json.loads, file.read_text().split("\n")[1:-1])


def _joined(
    folder: Path, target: str, seed: int, line: Record, flags: str, commit: str | None
) -> Record:
    # Where the draft lay says nothing to others.
    draft = Path(line["draft"]).name
    record = line | {"question_seed": line["seed"], "seed": seed, "draft": draft}
    record |= {"commit": commit or line["commit"], "xla_flags": flags}
    if line["method"] == PLAIN:
        return record
    facts = folder / target / "drafts" / draft.split(",")[0] / "training.json"
    return record | json.loads(facts.read_text())


def write_records(records: Sequence[Record], file: Path) -> None:
    """A JSON list with one record a line. A file that is there is whole."""
    lines = ",\n".join(
        json.dumps({name: record[name] for name in FIRST} | record) for record in records
    )
    part = file.with_name(f"{file.name}.part")
    part.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    part.rename(file)


def markdown(records: Sequence[Record]) -> str:
    """One table a target: every value the mean over seeds, with the sample's standard deviation."""
    lines = ["# The demo's tables", "", *_setting(records), ""]
    for cells in by_target(averages(records)):
        groups = _groups([record for record in records if record["target"] == cells.target])
        flight = [f"{slots} in flight" for slots in cells.concurrency]
        columns = ["method", "seeds", "draft parameters", "tau", "right answers",
                   "answers equal to plain decoding's", *flight]  # fmt: skip
        lines += [f"## {cells.target}", "", "Under requests in flight: tokens/s (speed-up).", ""]
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for method in cells.methods:
            lines.append(f"| {' | '.join(_row(cells, groups, method))} |")
        lines += ["", *_notes(groups)]
    return "\n".join(lines).rstrip() + "\n"


def averages(records: Sequence[Record]) -> list[Record]:
    """One record for all seeds of a cell; a speed-up only where no seed's was withheld."""
    made = []
    for (target, method, benchmark, slots), some in _cells(records).items():
        speedups = [record["speedup"] for record in some]
        withheld = [record["withheld"] for record in some if record["withheld"]]
        made.append(
            {
                "target": target, "method": method, "benchmark": benchmark, "concurrency": slots,
                "tau": float(np.mean([record["tau"] for record in some])),
                "speedup": None if withheld else float(np.mean(speedups)),
                "withheld": withheld[0] if withheld else None,
                "accepted_per_position": np.mean(
                    [record["accepted_per_position"] for record in some], axis=0
                ).tolist(),
                "device": some[0]["device"],
            }
        )  # fmt: skip
    return made


def plot(records: Sequence[Record], folder: Path) -> list[Path]:
    """Bars of tau and of speed-up of each target, means over seeds, as PNG files."""
    # Slow to import.
    from mmflash_jax.evaluation.bars import plot_speedup, plot_tau

    files = []
    for cells in by_target(averages(records)):
        for name, draw in {"tau": plot_tau, "speedup": plot_speedup}.items():
            files.append(folder / f"tables_{cells.target}_{name}.png")
            draw(cells, files[-1])
    return files


def _cells(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        cell = tuple(record[name] for name in FIRST[:4])
        if record["seed"] in [other["seed"] for other in found.get(cell, [])]:
            raise ValueError(f"two records of {cell}, seed {record['seed']}: remove one")
        found.setdefault(cell, []).append(record)
    return found


def _groups(records: Sequence[Record]) -> Groups:
    """Records of one target by method and requests in flight."""
    found: Groups = {}
    for record in records:
        found.setdefault((record["method"], record["concurrency"]), []).append(record)
    return found


def _row(cells: Cells, groups: Groups, method: str) -> list[str]:
    every = [r for slots in cells.concurrency for r in groups.get((method, slots), [])]
    first = groups.get((method, cells.concurrency[0])) or every
    equal, asked, ties = (
        sum(record[name] for record in every)
        for name in ("rows_equal", "questions", "numeric_ties")
    )
    return [
        method,
        str(len({record["seed"] for record in every})),
        f"{first[0]['draft_parameters']:,}",
        spread([record["tau"] for record in first], 2),
        f"{100 * np.mean([record['accuracy'] for record in every]):.1f} %",
        f"{equal} of {asked}" + (f", {ties} left them at a tie" if ties else ""),
        *(_speed(groups.get((method, slots), [])) for slots in cells.concurrency),
    ]


def _speed(records: Sequence[Record]) -> str:
    known = [record for record in records if record["speedup"] is not None]
    lost = f"{WITHHELD} in {len(records) - len(known)} of {len(records)} runs"
    if not known:
        return lost if records else "-"
    speed = f"{np.mean([record['tokens_per_s'] for record in known]):,.0f}"
    shown = f"{speed} ({spread([record['speedup'] for record in known], 2)})"
    return shown if len(known) == len(records) else f"{shown}, {lost}"


def _setting(records: Sequence[Record]) -> list[str]:
    """What all records share; a CPU is named as what it is."""

    def each(name: str) -> str:
        found = {str(record[name]) for record in records if record.get(name) is not None}
        return ", ".join(sorted(found)) or "unknown"

    lines = [
        f"{each('device')}, {each('dtype')}, kernels {each('kernels')}, commit {each('commit')}. "
        f"Every draft: {each('steps')} steps of {each('batch')} rows, from the same "
        f"{each('training_prompts')} prompts and the target's own answers to them. "
        f"{each('questions')} held-out charts, greedy, at most {each('max_tokens')} tokens an "
        f"answer, {each('repeats')} timed pass(es) a seed. ±: standard deviation over seeds of the "
        "training. tau: tokens a verify step. Speed: decoding alone, without prefill. Speed-up: "
        f"over plain decoding in the same run. XLA_FLAGS: `{each('xla_flags')}`. The command: "
        "docs/evaluation.md."
    ]
    if "cpu" in each("device").casefold():
        lines += ["", "**Measured on a CPU**: speeds say nothing about accelerators."]
    return lines


def _notes(groups: Groups) -> list[str]:
    notes = [
        f"- {record['method']}, seed {record['seed']}, {record['concurrency']} in flight: "
        f"{record['withheld']}"
        for records in groups.values()
        for record in records
        if record["withheld"]
    ]
    return ["Speeds are withheld where parity failed:", "", *notes, ""] if notes else []
