"""Mathematics in pictures: DynaMath, MathVista, MathVerse."""

import ast
from collections.abc import Mapping
from typing import Any

from mmflash_jax.evaluation.benchmarks.choice_questions import LETTER
from mmflash_jax.evaluation.benchmarks.layout import Asked, Benchmark, known, need
from mmflash_jax.evaluation.benchmarks.question import LETTERS

SHORT = "a number, an expression or a short phrase"
DYNAMATH_TOLERANCE = 1e-3


def _dynamath(values: Mapping[str, Any]) -> Asked:
    question, answer, kind = need(values, "question"), known(values), need(values, "kind")
    match kind:
        case "multiple choice":
            return Asked(question=question, wanted=LETTER, answer=answer, rule="letter")
        case "float":
            return Asked(
                question=question, wanted="a number with three decimal places", answer=answer,
                rule="number", tolerance=DYNAMATH_TOLERANCE,
            )  # fmt: skip
        case "text":
            return Asked(question=question, wanted=SHORT, answer=answer, rule="text")
    raise ValueError(f"answer_type is {kind!r}, expected float, multiple choice or text")


DYNAMATH = Benchmark(
    name="DynaMath",
    source="DynaMath/DynaMath_Sample (its first variant; name a file for another)",
    files=(
        "data/sample1-*.parquet",
        "data/sample_variant1-*.parquet",
        "sample1-*.parquet",
        "DynaMath.tsv",
    ),
    columns={
        "question": ("question",),
        "answer": ("ground_truth", "answer"),
        "kind": ("answer_type",),
    },
    optional={"id": ("id", "index")},
    pictures=("decoded_image", "image"),
    ask=_dynamath,
)


def _mathvista(values: Mapping[str, Any]) -> Asked:
    question, answer = need(values, "question"), known(values)
    kind = need(values, "question_kind")
    if kind == "multi_choice":
        choices = _listed(values.get("choices"))
        if answer is not None and answer not in choices:
            raise ValueError(f"its answer {answer!r} is none of the choices {choices}")
        letter = None if answer is None else LETTERS[choices.index(answer)]
        return Asked(
            question=question, wanted=LETTER, answer=letter, rule="letter", choices=choices
        )
    if kind != "free_form":
        raise ValueError(f"question_type is {kind!r}, expected multi_choice or free_form")
    unit = known(values, "unit")
    unit = "" if unit is None else f", in {unit}"
    match need(values, "answer_kind"):
        case "integer":
            return Asked(
                question=question, wanted=f"an integer{unit}", answer=answer, rule="number"
            )
        case "float":
            places = int(float(values.get("precision", 2)))
            return Asked(
                question=question, wanted=f"a number with {places} decimal places{unit}",
                answer=answer, rule="number", tolerance=0.5 * 10**-places,
            )  # fmt: skip
        case "list":
            return Asked(
                question=question, wanted="a list such as [1, 2, 3]", answer=answer, rule="text"
            )
        case "text":
            return Asked(question=question, wanted=SHORT, answer=answer, rule="text")
        case other:
            raise ValueError(f"answer_type is {other!r}, expected integer, float, list or text")


def _listed(value: Any) -> tuple[str, ...]:
    """Choices of a parquet or JSON list, or of a TSV that wrote the list as text."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = None
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"its choices are {value!r}, expected a list of options")
    return tuple(str(choice).strip() for choice in value)


MATHVISTA = Benchmark(
    name="MathVista",
    source="AI4Math/MathVista (testmini: the answers of its test split are not published)",
    files=(
        "data/testmini-*.parquet",
        "testmini-*.parquet",
        "testmini.json",
        "data/testmini.json",
        "annot_testmini.json",
    ),
    columns={
        "question": ("question",),
        "answer": ("answer",),
        "question_kind": ("question_type",),
        "answer_kind": ("answer_type",),
    },
    optional={
        "choices": ("choices",),
        "unit": ("unit",),
        "precision": ("precision",),
        "id": ("pid", "index"),
    },
    pictures=("decoded_image", "image"),
    folders=(".", ".."),
    images="images.zip",
    ask=_mathvista,
)

IN_THE_PICTURE = "The question is written in the image."


def _mathverse(values: Mapping[str, Any]) -> Asked:
    # The version "Vision Only" has the question in the picture alone.
    question, kind = known(values, "question") or IN_THE_PICTURE, need(values, "kind")
    if kind not in ("multi-choice", "free-form"):
        raise ValueError(f"question_type is {kind!r}, expected multi-choice or free-form")
    choice = kind == "multi-choice"
    return Asked(
        question=question, wanted=LETTER if choice else SHORT, answer=known(values),
        rule="letter" if choice else "text",
    )  # fmt: skip


MATHVERSE = Benchmark(
    name="MathVerse",
    source="AI4Math/MathVerse",
    files=("testmini.parquet", "data/testmini-*.parquet", "testmini.json", "data/testmini.json"),
    columns={"question": ("question",), "answer": ("answer",), "kind": ("question_type",)},
    optional={"id": ("sample_index", "index")},
    pictures=("image",),
    folders=(".", "images", "..", "../images"),
    images="images.zip",
    ask=_mathverse,
)
