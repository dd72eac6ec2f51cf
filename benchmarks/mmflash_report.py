"""The comparison's records as one list, a table and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.evaluation.visual import BUCKETS

Record = dict[str, Any]
KEY = ("target", "steps", "batch", "training_prompts", "variant", "seed")


def join(records: Sequence[Record]) -> list[Record]:
    """Records in order. Raises ValueError if two are of the same run."""
    ordered = sorted(records, key=lambda record: tuple(record[name] for name in KEY))
    seen: set[tuple[Any, ...]] = set()
    for record in ordered:
        key = tuple(record[name] for name in KEY)
        if key in seen:
            raise ValueError(f"two records of {dict(zip(KEY, key, strict=True))}: remove one file")
        seen.add(key)
    return ordered


def groups(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Records by target, steps and variant: one entry for all seeds; dflash first."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    order = {"dflash": 0, "mmflash": 1}
    for record in sorted(
        records,
        key=lambda r: (r["target"], r["steps"], order.get(r["variant"], 2), r["variant"]),
    ):
        key = (record["target"], record["steps"], record["variant"])
        found.setdefault(key, []).append(record)
    return found


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean and standard deviation over seeds (of the sample, so none for one seed)."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{np.mean(known):.{digits}f}"
    return mean if len(known) < 2 else f"{mean} ± {np.std(known, ddof=1):.{digits}f}"


def table(records: Sequence[Record]) -> str:
    """Markdown: mean and standard deviation over seeds, for every target and number of steps."""
    columns = {
        "tau": lambda r: r["tau"],
        **{f"tau {b}": lambda r, b=b: r["tau_by_visual_bucket"][b] for b in BUCKETS},
        **{f"acc. {b}": lambda r, b=b: r["acceptance_by_visual_bucket"][b] for b in BUCKETS},
        "acc. slot 1": lambda r: r["accepted_per_position"][0],
        "rejection ~ score": lambda r: r["rejection_correlation"]["pearson"],
        "weight on top": lambda r: r["weight_share_of_top"],
    }
    lines: list[str] = []
    previous: tuple[Any, ...] | None = None
    for (target, steps, variant), of_seeds in groups(records).items():
        if (target, steps) != previous:
            previous = (target, steps)
            lines += [
                "", f"### {target}, {steps} steps", "",
                f"| variant | seeds | {' | '.join(columns)} |",
                "|---|---|" + "---|" * len(columns),
            ]  # fmt: skip
        cells = [spread([value(record) for record in of_seeds]) for value in columns.values()]
        lines.append(f"| {variant} | {len(of_seeds)} | {' | '.join(cells)} |")
    parity = sum(record["parity"] is True for record in records)
    lines += ["", f"Parity holds in {parity} of {len(records)} runs."]
    return "\n".join(lines).strip() + "\n"


def plot(records: Sequence[Record], path: Path) -> None:
    """tau and acceptance by visual bucket of every variant, mean and each seed, as PNG."""
    from mmflash_jax.evaluation.plots import new_figure, save

    found = groups(records)
    rows = sorted({key[:2] for key in found})
    figure, axes = new_figure(len(rows), 1 + len(BUCKETS), width=3.4, height=2.9)
    for row, (target, steps) in enumerate(rows):
        here = {key[2]: value for key, value in found.items() if key[:2] == (target, steps)}
        values = {"tau (tokens a verify step)": lambda r: r["tau"]} | {
            f"acceptance, {b} scores": lambda r, b=b: r["acceptance_by_visual_bucket"][b]
            for b in BUCKETS
        }
        for axis, (title, value) in zip(axes[row], values.items(), strict=True):
            for place, (name, of_seeds) in enumerate(here.items()):
                known = [value(r) for r in of_seeds if value(r) is not None]
                colour = "tab:grey" if name == "dflash" else "tab:blue"
                axis.scatter([place] * len(known), known, s=14, color=colour, alpha=0.6)
                if known:
                    axis.hlines(np.mean(known), place - 0.3, place + 0.3, color=colour)
            axis.set_xticks(range(len(here)), list(here), rotation=60, ha="right", fontsize=8)
            axis.set_title(f"{target}, {steps} steps\n{title}", fontsize=9)
            axis.grid(axis="y", alpha=0.3)
    save(figure, path)
