"""Multiple choice: MMStar, whose options are part of the question, and MMBench, with columns."""

from collections.abc import Mapping
from typing import Any

from mmflash_jax.evaluation.benchmarks.layout import Asked, Benchmark, known, need
from mmflash_jax.evaluation.benchmarks.question import LETTERS

LETTER = "the letter of the right option"


def _mmstar(values: Mapping[str, Any]) -> Asked:
    return Asked(
        question=need(values, "question"), wanted=LETTER, answer=known(values), rule="letter"
    )


MMSTAR = Benchmark(
    name="MMStar",
    source="Lin-Chen/MMStar",
    files=("mmstar.parquet", "data/val-*.parquet", "val-*.parquet", "MMStar.tsv"),
    columns={"question": ("question",), "answer": ("answer",)},
    optional={"id": ("index",)},
    pictures=("image", "image_path"),
    ask=_mmstar,
)


def _mmbench(values: Mapping[str, Any]) -> Asked:
    choices = []
    for letter in LETTERS[:4]:
        if known(values, letter) in (None, "nan"):
            break
        choices.append(need(values, letter))
    if len(choices) < 2:
        raise ValueError(f"it has {len(choices)} options, expected A, B and more")
    hint, question = known(values, "hint"), need(values, "question")
    if hint not in (None, "nan"):
        question = f"{hint}\n{question}"
    return Asked(
        question=question, wanted=LETTER, answer=known(values), rule="letter",
        choices=tuple(choices),
    )  # fmt: skip


MMBENCH = Benchmark(
    name="MMBench",
    source="lmms-lab/MMBench (its `en` dev split) or VLMEvalKit's MMBench_DEV_EN.tsv",
    files=(
        "en/dev-*.parquet",
        "data/dev-*.parquet",
        "dev-*.parquet",
        "MMBench_DEV_EN_V11.tsv",
        "MMBench_DEV_EN.tsv",
    ),
    columns={"question": ("question",), "answer": ("answer",), "A": ("A",), "B": ("B",)},
    optional={"C": ("C",), "D": ("D",), "hint": ("hint",), "id": ("index",)},
    pictures=("image", "image_path"),
    ask=_mmbench,
)
