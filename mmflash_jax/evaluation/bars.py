"""Plots of an evaluation: bars of tau and speed-up by benchmark and method, acceptance by slot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.evaluation.plots import new_figure, save
from mmflash_jax.evaluation.records import PLAIN
from mmflash_jax.evaluation.tables import WITHHELD, Cells

WIDTH = 0.8
"""Of all bars of a benchmark, as a share of its place."""


def plot_tau(cells: Cells, file: Path) -> None:
    """Tokens a verify step, at the smallest number in flight."""
    first = cells.concurrency[0]
    figure, axes = new_figure(1, 1, width=_width(cells), height=3.6)
    _bars(axes[0, 0], cells, first, "tau")
    axes[0, 0].set_ylabel("tau (tokens a verify step)")
    axes[0, 0].set_title(_title(cells, first), fontsize=10)
    _legend(axes[0, 0])
    save(figure, file)


def plot_positions(cells: Cells, file: Path) -> None:
    """Share of verify steps that kept at least k drafts, mean over benchmarks, a line a method."""
    first = cells.concurrency[0]
    figure, axes = new_figure(1, 1, width=6.5, height=3.6)
    for method in _drafted(cells):
        found = [r["accepted_per_position"] for r in cells.over(method, first) if r is not None]
        if not found or not found[0]:
            continue
        shares = np.mean(found, axis=0)
        axes[0, 0].plot(1 + np.arange(len(shares)), shares, marker=".", label=method)
    axes[0, 0].set(xlabel="slot k of the block", ylim=(0, 1))
    axes[0, 0].set_ylabel("share of steps that kept k drafts")
    axes[0, 0].set_title(_title(cells, first), fontsize=10)
    axes[0, 0].grid(alpha=0.3)
    if axes[0, 0].lines:
        _legend(axes[0, 0])
    save(figure, file)


def plot_speedup(cells: Cells, file: Path) -> None:
    """Speed-up over plain decoding, a panel for each number in flight."""
    rows = len(cells.concurrency)
    figure, axes = new_figure(rows, 1, width=_width(cells), height=2.8)
    for axis, slots in zip(axes[:, 0], cells.concurrency, strict=True):
        _bars(axis, cells, slots, "speedup")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel("speed-up over plain")
        axis.set_title(_title(cells, slots), fontsize=10)
    _legend(axes[0, 0])
    save(figure, file)


def _title(cells: Cells, slots: int) -> str:
    devices = {record["device"] for record in cells.records.values()}
    return f"{Path(cells.target).name}, {slots} in flight, {', '.join(sorted(devices))}"


def _width(cells: Cells) -> float:
    """Inches that hold every bar and the legend's names."""
    return max(5.5, 1.2 + 0.35 * len(cells.benchmarks) * len(_drafted(cells)))


def _drafted(cells: Cells) -> Sequence[str]:
    """Plain decoding is 1 by definition and gets no bar, unless there is nothing else."""
    return [method for method in cells.methods if method != PLAIN] or cells.methods


def _bars(axis: Any, cells: Cells, slots: int, field: str) -> None:
    methods = _drafted(cells)
    place, width = np.arange(len(cells.benchmarks)), WIDTH / len(methods)
    for number, method in enumerate(methods):
        records = cells.over(method, slots)
        heights = [0.0 if r is None or r[field] is None else r[field] for r in records]
        words = [_label(record, field) for record in records]
        offset = (number - (len(methods) - 1) / 2) * width
        bars = axis.bar(place + offset, heights, 0.95 * width, label=method)
        for bar, told in zip(bars, words, strict=True):
            axis.annotate(
                told, (bar.get_x() + bar.get_width() / 2, bar.get_height()), (0, 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=7,
                rotation=90 if told == WITHHELD else 0,
            )  # fmt: skip
    axis.set_xticks(place, cells.benchmarks)
    # A single bar would fill the whole axis.
    middle, half = (len(place) - 1) / 2, max(len(place) / 2 + 0.25, 1.25)
    axis.set_xlim(middle - half, middle + half)
    axis.margins(y=0.2)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _label(record: Any, field: str) -> str:
    if record is None:
        return ""
    if record[field] is None:
        return WITHHELD if record["withheld"] else ""
    return f"{record[field]:.2f}"


def _legend(axis: Any) -> None:
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
