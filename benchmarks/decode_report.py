"""Speeds as a table and beside the card's roofs, and the tau that each method needs to pay.

    python -m benchmarks.decode_report decode_qwen35.json decode_gemma4.json --plot decode.png

Reads records of `benchmarks.decode`. With a step of s ms a method beats plain decoding, whose step
takes p ms and yields one token, if it commits more than s / p tokens a step; it matches MMFlash,
whose step takes m ms and commits tau, at tau x s / m.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.traffic import BANDWIDTH, OPERATIONS
from mmflash_jax.evaluation.plots import new_figure, save

Record = dict[str, Any]
GROUP = ("target", "device", "kernels", "context", "batch")
REFERENCE = "dflash"
"""MMFlash is a DFlash draft: its step is the same."""


@dataclass(frozen=True)
class Arguments:
    """What to read."""

    records: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of `benchmarks.decode`. Of two records of one cell the later one counts."""
    tau: float | None = None
    """MMFlash's mean of committed tokens. Default: the one that its record was timed with."""
    plot: Path | None = None
    """PNG to draw the roofline to."""


def rows(records: Iterable[Record], tau: float | None = None) -> list[Record]:
    """A row for every cell, by target and batch, the methods in the order of the records.

    beat: tau above which the method is faster than plain decoding, None without a plain step.
    match: tau at which it is as fast as MMFlash at `mmflash_tau`, None without a step of that.
    """
    groups: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        key = tuple(record[name] for name in GROUP)
        groups.setdefault(key, {})[record["drafter"]] = record
    found = []
    for key in sorted(groups, key=lambda key: tuple(str(part) for part in key[:4]) + key[4:]):
        group = groups[key]
        mmflash = group.get(REFERENCE)
        of_mmflash = tau or (mmflash or {}).get("asked_tau")
        for name, record in group.items():
            step = record["step_ms"]
            plain = record.get("plain_step_ms", group.get("none", {}).get("step_ms"))
            found.append({
                **dict(zip(GROUP, key, strict=True)), "method": name, "step_ms": step,
                "most_tau": record.get("most_tau"), "mmflash_tau": of_mmflash,
                "beat": None if plain is None or name == "none" else step / plain,
                "match": None if mmflash is None else of_mmflash * step / mmflash["step_ms"],
            })  # fmt: skip
    return found


def table(found: Sequence[Record]) -> str:
    """Markdown, a table for each device, kernels and context. A tau that the method cannot commit
    is marked."""
    parts = []
    for setting in dict.fromkeys(tuple(row[name] for name in GROUP[1:4]) for row in found):
        device, kernels, context = setting
        parts += [f"{device}, kernels {kernels}, context {context:,}:", ""]
        parts += [
            "| target | batch | method | step, ms | most it commits | tau to beat plain "
            "| tau to match MMFlash |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in found:
            if tuple(row[name] for name in GROUP[1:4]) != setting:
                continue
            match = _tau(row["match"], row["most_tau"])
            if row["method"] == REFERENCE:
                match = f"{row['mmflash_tau']:.2f} (its own)"
            parts.append(
                f"| {row['target']} | {row['batch']} | {row['method']} | {row['step_ms']:.2f} "
                f"| {row['most_tau'] or '-'} | {_tau(row['beat'], row['most_tau'])} | {match} |"
            )
        parts.append("")
    return "\n".join(parts)


def speeds(records: Sequence[Record]) -> str:
    """Markdown, a row for each record: what was reached. Ratios are of one run."""
    names = (
        "target", "batch", "context", "method", "step, ms", "tokens/s", "times plain",
        f"of {BANDWIDTH / 1e12:.1f} TB/s", f"of {OPERATIONS / 1e12:.0f} TFLOP/s", "memory, GB",
        "launches",
    )  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    for r in records:
        plain, memory = r.get("plain_tokens_per_s"), r["memory_bytes"]
        cells = (
            r["target"], r["batch"], f"{r['context']:,}", r["drafter"], f"{r['step_ms']:.2f}",
            f"{r['tokens_per_s']:,.0f}", "-" if not plain else f"{r['tokens_per_s'] / plain:.2f}",
            f"{100 * r['bandwidth_share']:.0f} %",
            "-" if not r.get("operations") else f"{100 * _rate(r) / OPERATIONS:.0f} %",
            "-" if not memory else f"{memory / 1e9:.1f}",
            r.get("profile", {}).get("launches", "-"),
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _rate(record: Record) -> float:
    """Operations a second."""
    return record["operations"] / record["step_ms"] * 1e3


def plot(records: Sequence[Record], path: Path) -> None:
    """The roofline: what steps reach, by operations for each byte they must move, as PNG.

    Records without a count of operations are left out.

    Raises:
        SystemExit: none has one.
    """
    counted = [record for record in records if record.get("operations")]
    if not counted:
        raise SystemExit(f"--plot {path}: no record counts operations, there is nothing to draw")
    targets = list(dict.fromkeys(record["target"] for record in counted))
    drafted = sorted({record["drafter"] for record in counted} - {"none"})
    # The eighth of matplotlib's colours is the grey of plain decoding.
    colours = {name: f"C{number % 7}" for number, name in enumerate(drafted)} | {"none": "tab:grey"}
    figure, axes = new_figure(1, len(targets), width=4.8, height=3.8)
    for axis, target in zip(axes[0], targets, strict=True):
        here = [record for record in counted if record["target"] == target]
        x = np.geomspace(0.5, 2000, 200)
        axis.plot(x, np.minimum(x * BANDWIDTH, OPERATIONS) / 1e12, color="black", linewidth=1)
        for name, colour in colours.items():
            own = [record for record in here if record["drafter"] == name]
            if not own:
                continue
            at = [record["operations"] / record["bytes_moved"] for record in own]
            reached = [_rate(record) / 1e12 for record in own]
            axis.scatter(at, reached, s=22, color=colour, label="plain" if name == "none" else name)
            for record, *place in zip(own, at, reached, strict=True):
                said = f"{record['batch']} x {record['context'] // 1024}k"
                axis.annotate(said, place, (4, -9), textcoords="offset points", fontsize=7)
        axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
        axis.set_title(
            f"{target}: batch x context\nsynthetic acceptance, random weights", fontsize=9
        )
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    save(figure, path)


def _tau(value: float | None, most: int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (" (cannot)" if most is not None and value > most else "")


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    records = [one for path in arguments.records for one in json.loads(path.read_text())]
    print(speeds(records))
    print(table(rows(records, arguments.tau)))
    if arguments.plot:
        plot(records, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
