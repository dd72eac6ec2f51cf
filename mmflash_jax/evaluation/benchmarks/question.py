"""A benchmark's question as every reader makes it, and the words around it."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmflash_jax.engine.images import Source

Rule = Literal["relaxed", "letter", "number", "text"]
Style = Literal["reason", "direct"]
"""reason: the model thinks aloud and ends with an answer line; direct: it says the answer alone.

Answers of a few tokens say nothing about a draft, so speed is measured with `reason`.
"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of a benchmark.

    id: its own, unique in the benchmark.
    text: all that the model is told besides the pictures.
    answer: the reference; None where the benchmark keeps it to itself.
    rule: how an answer is scored (`benchmarks.scoring`).
    choices: texts of the options A, B, ...; () if the question's own text lists them or has none.
    tolerance: of rule "number": the largest difference of a right answer.
    """

    id: str
    text: str
    images: tuple[Source, ...]
    answer: str | None
    rule: Rule
    choices: tuple[str, ...] = ()
    tolerance: float = 0.0


LETTERS = string.ascii_uppercase


def word(question: str, wanted: str, style: Style, choices: Sequence[str] = ()) -> str:
    """What the model is told: the question, its options and the form of the answer.

    `wanted` names that form and completes "Answer with ...".
    """
    options = (f"({letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False))
    if style == "direct":
        form = f"Answer with {wanted} and nothing else."
    else:
        form = (
            "Look closely at the image and reason step by step. Then end with a line "
            f'"Answer: X", where X is {wanted}.'
        )
    return "\n".join([question.strip(), *options, form])
