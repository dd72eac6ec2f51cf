"""Figures of a run as PNG files. Nothing is shown on a display."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from mmflash_jax.evaluation.visual import BUCKETS


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, Any]:
    """A figure of panels of `width` x `height` inches, and its axes `[rows, columns]`."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(width * columns, height * rows), layout=layout)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)


def plot_run(folder: Path, figures: Mapping[str, Any]) -> None:
    """Plots of a finished run into its folder, from `metrics.csv` and its evaluation."""
    with (folder / "metrics.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    metrics = {name: [float(line[name]) for line in lines] for name in lines[0]}
    plot_training(metrics, folder / "training.png")
    plot_positions(figures["accepted_per_position"], figures["tau"], folder / "positions.png")
    if figures["visual_buckets"]["top_from"] is not None:
        plot_buckets(figures, folder / "visual_buckets.png")


def plot_training(metrics: Mapping[str, Sequence[float]], path: Path) -> None:
    """Loss, accuracy of drafted slots, drafts kept and gradient norm over steps."""
    panels = {
        "loss": "loss (nats a slot, weighted)",
        "accuracy": "share of slots right",
        "kept": "drafts before the first wrong one",
        "grad_norm": "gradient norm before clipping",
    }
    steps = metrics["step"]
    figure, axes = new_figure(1, len(panels), width=3.6, height=3.0)
    for axis, (name, label) in zip(axes[0], panels.items(), strict=True):
        axis.plot(steps, metrics[name], marker="." if len(steps) < 20 else None)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    save(figure, path)


def plot_positions(accepted: Sequence[float], tau: float | None, path: Path) -> None:
    """Share of verify steps that kept at least k drafts."""
    figure, axes = new_figure(1, 1, width=5.5, height=3.4)
    axis = axes[0, 0]
    slots = np.arange(1, len(accepted) + 1)
    axis.bar(slots, accepted)
    axis.set(xlabel="slot k of the block", ylabel="share of steps that kept k drafts", ylim=(0, 1))
    axis.set_xticks(slots)
    axis.set_title("Acceptance per position" + ("" if tau is None else f", tau {tau:.2f}"))
    save(figure, path)


def plot_buckets(figures: Mapping[str, Any], path: Path) -> None:
    """Conditional acceptance and tau by visual bucket; how many slots and steps each stands on."""
    figure, axes = new_figure(1, 2, width=4.2, height=3.4)
    buckets = figures["visual_buckets"]
    names = {
        "top": f"top fifth\n≥ {buckets['top_from']:.2g}",
        "middle": "middle",
        "zero": f"zero\n< {buckets['zero_below']:.2g}",
    }
    panels = (
        ("acceptance_by_visual_bucket", "accepted share of tried slots", "tried"),
        ("tau_by_visual_bucket", "tokens a verify step", "steps"),
    )
    for axis, (name, label, count) in zip(axes[0], panels, strict=True):
        shown = [bucket for bucket in BUCKETS if figures[name][bucket] is not None]
        values = [figures[name][bucket] for bucket in shown]
        bars = axis.bar([names[bucket] for bucket in shown], values)
        axis.bar_label(
            bars,
            [f"{v:.2f}\nn = {buckets[b][count]}" for v, b in zip(values, shown, strict=True)],
        )
        axis.set_xlabel("visual score of the token (nats)")
        axis.set_ylabel(label)
        axis.margins(y=0.25)
    save(figure, path)
