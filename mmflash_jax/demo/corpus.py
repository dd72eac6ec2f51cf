"""Chart question answering made from a seed: a picture, a question and a worked answer."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmflash_jax.demo.charts import KINDS, STYLES, Kind, Style, render_chart
from mmflash_jax.demo.reasoning import QUESTION_TYPES, Reading
from mmflash_jax.demo.tables import LARGEST_VALUE, TableSlice, load_slices
from mmflash_jax.demo.wording import ANSWER_MARK, write_exchange


@dataclass(frozen=True, eq=False)
class ChartExample:
    """One example. `answer` is the exact text after the last `Answer: ` of `answer_text`.

    `image` is uint8[112, 160, 3]; `glyph_codes` is uint8[14, 20], the character in each cell of a
    snapped chart (code point minus 32, zero for none). `table` names the slice that the chart was
    drawn from.
    """

    image: np.ndarray
    question: str
    answer_text: str
    answer: str
    kind: Kind
    question_type: str
    labels: tuple[str, ...]
    values: tuple[int, ...]
    style: Style
    glyph_codes: np.ndarray
    metric: str
    table: str


def sample_examples(
    count: int,
    seed: int,
    style: Style | Literal["both"] = "both",
    held_out: bool = False,
    augment: bool | None = None,
) -> list[ChartExample]:
    """Draw examples; the same arguments always give the same ones.

    `augment` perturbs half of the charts' values and replaces some labels by random letters, so
    that nothing can be learnt by heart. It defaults to on for training slices and off for held-out
    ones.
    """
    rng = random.Random(f"chart corpus {seed}")
    augment = not held_out if augment is None else augment
    slices = load_slices(held_out)
    weights = [table.weight for table in slices]
    examples = []
    for index in range(count):
        chart_style = STYLES[index % 2] if style == "both" else style
        table = rng.choices(slices, weights)[0]
        examples.append(_sample_example(table, chart_style, augment, rng))
    return examples


def final_answer(text: str) -> str | None:
    """What follows the last `Answer: `, or None when there is none."""
    _, mark, answer = text.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None


def is_correct(text: str, example: ChartExample) -> bool:
    """Exact comparison of the final answer; everything before it is free."""
    return final_answer(text) == example.answer


def _sample_example(
    table: TableSlice, style: Style, augment: bool, rng: random.Random
) -> ChartExample:
    labels, values = _sample_entities(table, augment, rng)
    kind = rng.choice(KINDS)
    image, glyph_codes = render_chart(kind, table.metric, labels, values, style, rng)
    question_type = rng.choice(QUESTION_TYPES)
    reading = Reading(table.entity, table.metric, kind, labels, values)
    exchange = write_exchange(reading, question_type, rng)
    return ChartExample(
        image=image,
        question=exchange.question,
        answer_text=exchange.answer_text,
        answer=exchange.answer,
        kind=kind,
        question_type=question_type,
        labels=tuple(labels),
        values=tuple(values),
        style=style,
        glyph_codes=glyph_codes,
        metric=table.metric,
        table=f"{table.metric} {table.name}",
    )


def _sample_entities(
    table: TableSlice, augment: bool, rng: random.Random
) -> tuple[Sequence[str], Sequence[int]]:
    """Three to five entities whose labels and values are all different."""
    count = rng.randint(3, 5)
    known = sorted(table.values)
    while True:
        labels = rng.sample(known, count)
        values = [table.values[label] for label in labels]
        if augment and rng.random() < 0.5:
            values = [_perturbed(value, rng) for value in values]
        if augment and rng.random() < 0.3:
            labels = ["".join(rng.choices(string.ascii_uppercase, k=3)) for _ in labels]
        if len(set(values)) == len(set(labels)) == count:
            return labels, values


def _perturbed(value: int, rng: random.Random) -> int:
    changed = round(value * rng.uniform(0.4, 1.8)) + rng.randint(0, 9)
    return min(LARGEST_VALUE, max(1, changed))
