"""How well a pair does on held-out charts: `python -m mmflash_jax.evaluation.charts --count 256`.

Charts come from table slices that no training saw. Every answer is decoded freely, through the
drafted loop, with the picture, with a grey and a white one of its size, and with another chart's.
"""

import json
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from PIL import Image

from mmflash_jax.config import ServeConfig
from mmflash_jax.demo.charts import STYLES
from mmflash_jax.demo.corpus import ChartExample, is_correct, sample_examples
from mmflash_jax.engine.prompts import Request
from mmflash_jax.evaluation import report
from mmflash_jax.evaluation.batch import Session, load
from mmflash_jax.evaluation.measure import measure

PICTURES = ("image", "grey", "white", "swapped")


@dataclass(frozen=True)
class Arguments:
    """Accuracy, tau and parity on held-out charts."""

    target: str = "demo"
    """Short name, local folder or hub id of the target."""
    draft: str | None = None
    """Folder or hub id of the draft, or "none". Default: what the short name brings."""
    count: int = 256
    """Charts of each style."""
    seed: int = 20
    batch: int = 64
    """Rows decoded at once."""
    max_tokens: int = 160
    report: Path | None = None
    """JSON file for the figures."""


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    arguments = tyro.cli(Arguments, description=__doc__)
    session = load(ServeConfig(target=arguments.target, draft=arguments.draft))
    figures: dict[str, Any] = {
        "device": report.describe_device(),
        "dtype": session.plan.target.dtype,
        "versions": report.versions(),
        "count": arguments.count,
        "seed": arguments.seed,
    }
    for style in STYLES:
        examples = sample_examples(arguments.count, arguments.seed, style, held_out=True)
        figures[style] = evaluate_style(session, examples, arguments)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    if arguments.report:
        arguments.report.write_text(json.dumps(figures, indent=2) + "\n")
    parity = all(figures[style]["parity"] for style in STYLES)
    return 0 if parity else 1


def evaluate_style(
    session: Session, examples: Sequence[ChartExample], arguments: Arguments
) -> dict[str, Any]:
    """Figures over charts of one style."""
    figures: dict[str, Any] = {}
    for picture in PICTURES:
        shown = [_picture(examples, index, picture) for index in range(len(examples))]
        prompts = [
            session.encoder.encode(
                Request(text=e.question, images=(image,), max_tokens=arguments.max_tokens)
            )
            for e, image in zip(examples, shown, strict=True)
        ]
        measured = measure(
            session.plan, session.params, prompts, arguments.batch,
            title=f"{examples[0].style}, {picture}", plain=picture == "image",
        )  # fmt: skip
        drafted = measured.drafted
        texts = [session.encoder.decode(c.token_ids) for c in drafted.completions]
        right = [is_correct(text, e) for text, e in zip(texts, examples, strict=True)]
        figures[f"accuracy_{picture}"] = sum(right) / len(right)
        if picture == "image":
            lengths = [len(completion.token_ids) for completion in drafted.completions]
            figures |= measured.figures() | {"mean_answer_tokens": sum(lengths) / len(lengths)}
    return figures


def _picture(examples: Sequence[ChartExample], index: int, kind: str) -> Image.Image:
    own = Image.fromarray(examples[index].image)
    if kind == "image":
        return own
    if kind == "swapped":
        # A fixed other chart, far enough that neighbours drawn alike do not matter.
        other = (index + random.Random(index).randrange(1, len(examples))) % len(examples)
        return Image.fromarray(examples[other].image)
    level = {"grey": 128, "white": 255}[kind]
    return Image.new("RGB", own.size, (level,) * 3)


if __name__ == "__main__":
    sys.exit(main())
