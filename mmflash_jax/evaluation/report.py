"""Figures of a run as a dict, and as text on the terminal."""

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax

import mmflash_jax
from mmflash_jax.decode.records import Plan
from mmflash_jax.engine.prompt_files import Line
from mmflash_jax.evaluation.exactness import Parity
from mmflash_jax.evaluation.measure import Measured


def figures(
    plan: Plan, measured: Measured, *, accuracy: float | None, accuracy_blank: float | None
) -> dict[str, Any]:
    """Everything that `--report` writes."""
    parity = measured.parity
    return measured.figures() | {
        "divergences": []
        if parity is None
        else [
            {"row": d.row, "place": d.place, "gap": d.gap, "explained": d.explained}
            for d in parity.divergences
        ],
        "accuracy": accuracy,
        "accuracy_blank_image": accuracy_blank,
        "dtype": plan.target.dtype,
        "device": describe_device(),
        "versions": versions(),
    }


def describe_device() -> str:
    """The accelerator, or the CPU, that ran it."""
    device = jax.devices()[0]
    return f"{len(jax.devices())} x {device.device_kind} ({platform.machine()})"


def versions() -> dict[str, str]:
    """Versions that decide numbers."""
    names = ("jax", "flax", "transformers", "numpy")
    found = {"python": platform.python_version(), "mmflash-jax": mmflash_jax.__version__}
    for name in names:
        found[name] = importlib.metadata.version(name)
    return found


def print_answers(lines: Sequence[Line], texts: Sequence[str], measured: Measured) -> None:
    """One paragraph a prompt."""
    out = sys.stdout
    for row, (line, text, completion) in enumerate(
        zip(lines, texts, measured.drafted.completions, strict=True)
    ):
        same = "" if measured.parity is None else _verdict(measured.parity, row)
        tau = "-" if completion.tau is None else f"{completion.tau:.2f}"
        out.write(f"[{line.id}] {line.question}\n")
        out.write(f"  {text}\n")
        expected = "" if line.answer is None else f" · expected {line.answer}"
        out.write(
            f"  {len(completion.token_ids)} tokens · tau {tau} · {completion.finish_reason}"
            f"{expected}{same}\n\n"
        )
    out.flush()


def _verdict(parity: Parity, row: int) -> str:
    if parity.equal[row]:
        return " · ids equal plain decoding"
    divergence = next(d for d in parity.divergences if d.row == row)
    kind = "a numeric tie" if divergence.explained else "NOT A TIE"
    gap = divergence.gap
    size = "one answer ends" if gap is None else f"fp32 gap {gap:.1e} of scale"
    return f" · ids differ from plain decoding at token {divergence.place}: {kind}, {size}"


def print_table(figures: dict[str, Any]) -> None:
    """The summary table."""
    out = sys.stdout

    def row(name: str, value: str) -> None:
        out.write(f"{name:<28} {value}\n")

    out.write(f"{'-' * 60}\n")
    row("prompts", str(figures["prompts"]))
    row("device", f"{figures['device']}, {figures['dtype']}")
    if figures["tau"] is not None:
        row("tau (tokens a verify step)", f"{figures['tau']:.2f}")
        shares = " ".join(f"{share:.2f}" for share in figures["accepted_per_position"])
        row("acceptance by position", shares or "- (no draft)")
    drafts = bool(figures["accepted_per_position"])
    if figures["tokens_per_s"] is not None:
        title = "tokens/s with the draft" if drafts else "tokens/s"
        row(title, f"{figures['tokens_per_s']:,.0f}")
    if drafts and figures["plain_tokens_per_s"] and figures["tokens_per_s"]:
        row("tokens/s plain", f"{figures['plain_tokens_per_s']:,.0f}")
        speedup = figures["tokens_per_s"] / figures["plain_tokens_per_s"]
        row("speed-up", f"{speedup:.2f}x")
    if figures["parity"] is not None:
        equal = f"{figures['rows_equal']} of {figures['prompts']} rows equal plain decoding"
        ties = len(figures["divergences"])
        row("parity", equal + (f", {ties} differ" if ties else ""))
        if not figures["parity"]:
            out.write("PARITY FAILED: a difference is no numeric tie; speeds are withheld\n")
    for name, title in (("accuracy", "accuracy"), ("accuracy_blank_image", "with blank images")):
        if figures[name] is not None:
            row(title, f"{100 * figures[name]:.1f} %")
    out.flush()
