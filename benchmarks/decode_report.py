"""Step times of every method as a table, and the tau each needs to pay.

    python -m benchmarks.decode_report decode_qwen35.json decode_gemma4.json

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

import tyro

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


def _tau(value: float | None, most: int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (" (cannot)" if most is not None and value > most else "")


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    records = [one for path in arguments.records for one in json.loads(path.read_text())]
    print(table(rows(records, arguments.tau)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
