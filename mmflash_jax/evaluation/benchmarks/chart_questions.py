"""Charts: ChartQA, CharXiv, and the demo's own from table slices that no training saw."""

from collections.abc import Mapping
from typing import Any

from PIL import Image

from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.evaluation.benchmarks.layout import Asked, Benchmark, known, need
from mmflash_jax.evaluation.benchmarks.question import Question

SHORT = "a number, a word or a short phrase"


def held_out_charts(count: int, seed: int) -> list[Question]:
    """The demo's charts, of both styles in turns, in the words that its targets were trained on."""
    return [
        Question(
            id=str(number),
            text=example.question,
            images=(Image.fromarray(example.image),),
            answer=example.answer,
            rule="text",
        )
        for number, example in enumerate(sample_examples(count, seed, held_out=True), start=1)
    ]


def _chartqa(values: Mapping[str, Any]) -> Asked:
    label = values.get("answer")
    if isinstance(label, list):
        label = ", ".join(map(str, label))
    answer = known({"answer": "" if label is None else label})
    return Asked(question=need(values, "question"), wanted=SHORT, answer=answer, rule="relaxed")


CHARTQA = Benchmark(
    name="ChartQA",
    source="HuggingFaceM4/ChartQA, lmms-lab/ChartQA or the release of vis-nlp/ChartQA",
    files=(
        "data/test-*.parquet",
        "test-*.parquet",
        "ChartQA_TEST.tsv",
        "test/test_*.json",
        "ChartQA Dataset/test/test_*.json",
    ),
    together=("test_augmented.json", "test_human.json"),
    columns={"question": ("query", "question"), "answer": ("label", "answer")},
    optional={"id": ("index",)},
    pictures=("image", "imgname", "image_path"),
    folders=("png", "."),
    images="the folder test/png of the release",
    ask=_chartqa,
)

# Kinds of answers of CharXiv's reasoning questions.
_CHARXIV_FORMS = {
    1: "text that stands in the chart; several terms are separated by commas",
    2: "one of the options of the question if it has any, else a short phrase",
    3: "a number that stands in the chart",
    4: "a number",
}


def _charxiv(values: Mapping[str, Any]) -> Asked:
    kind, answer = int(need(values, "kind")), known(values)
    if kind not in _CHARXIV_FORMS:
        raise ValueError(f"its kind of answer is {kind}, expected one of {sorted(_CHARXIV_FORMS)}")
    wanted, tolerance = _CHARXIV_FORMS[kind], 0.0
    if kind == 4 and answer is not None:
        # The benchmark tells the model how many decimal places count.
        places = len(answer.partition(".")[2])
        wanted = f"a number with {places} decimal places" if places else "an integer"
        tolerance = 0.5 * 10**-places if places else 0.0
    return Asked(
        question=need(values, "question"), wanted=wanted, answer=answer,
        rule="number" if kind == 4 else "text", tolerance=tolerance,
    )  # fmt: skip


CHARXIV = Benchmark(
    name="CharXiv",
    source="princeton-nlp/CharXiv (validation: the answers of its test split are not published)",
    files=(
        "val.parquet",
        "data/val*.parquet",
        "val-*.parquet",
        "data/reasoning_val.json",
        "reasoning_val.json",
    ),
    columns={
        "question": ("reasoning_q", "query"),
        "answer": ("reasoning_a", "answer"),
        # Not `reasoning_q_source`, which says where the question came from.
        "kind": ("reasoning_a_type", "inst_category"),
    },
    optional={"id": ("original_id", "figure_id")},
    pictures=("image", "figure_path", "figure_id"),
    folders=(".", "..", "images", "../images"),
    numbered=".jpg",
    images="images.zip",
    ask=_charxiv,
)
