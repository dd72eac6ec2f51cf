"""Readers of benchmarks, on tiny copies in every published layout, whole, partial and wrong."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mmflash_jax.engine.images import StoredImage
from mmflash_jax.evaluation.benchmarks import (
    BENCHMARKS,
    BenchmarkError,
    Question,
    is_right,
    read_questions,
    split_name,
)
from tests.evaluation import copies
from tests.evaluation.copies import red

LETTER = "the letter of the right option"
# Layouts, and of each question: picture, id, answer, rule, tolerance, choices, part of the text.
CASES = {
    "ChartQA": (
        (copies.chartqa, copies.chartqa_lmms, copies.chartqa_release),
        [
            (1, "1", "14", "relaxed", 0.0, (), "How many?\n"),
            (2, "2", "Norway", "relaxed", 0.0, (), "Who?\n"),
        ],
    ),
    "CharXiv": (
        (copies.charxiv, copies.charxiv_json),
        [
            (1, None, "lambda = 0.13", "text", 0.0, (), "text that stands in the chart"),
            (2, None, "0.25", "number", 0.005, (), "a number with 2 decimal places"),
        ],
    ),
    "MMStar": (
        (copies.mmstar, copies.mmstar_tsv),
        [
            (1, "0", "B", "letter", 0.0, (), "C: none, D: all\n"),
            (2, "1", "D", "letter", 0.0, (), LETTER),
        ],
    ),
    "MMBench": (
        (copies.mmbench, copies.mmbench_tsv),
        [
            (1, "241", "A", "letter", 0.0, ("red", "blue", "green", "none"), "Look.\nWhich?\n(A)"),
            (None, "1000241", "B", "letter", 0.0, ("here", "there"), "Where?\n(A) here\n(B) there"),
        ],
    ),
    "DynaMath": (
        (copies.dynamath,),
        [
            (1, "1", "2.667", "number", 1e-3, (), "three decimal places"),
            (2, "2", "B", "letter", 0.0, (), LETTER),
            (3, "3", "even", "text", 0.0, (), "What?\n"),
        ],
    ),
    "MathVista": (
        (copies.mathvista, copies.mathvista_json),
        [
            (1, "1", "4", "number", 0.0, (), "an integer"),
            (2, "2", "1.2", "number", 0.05, (), "a number with 1 decimal places, in cm"),
            (3, "3", "B", "letter", 0.0, ("Yes", "No"), "(A) Yes\n(B) No\n"),
        ],
    ),
    "MathVerse": (
        (copies.mathverse, copies.mathverse_json),
        [
            (1, "1", "A", "letter", 0.0, (), "Find x."),
            (2, "2", "y=2x", "text", 0.0, (), "The question is written in the image."),
        ],
    ),
}
LAYOUTS = [(name, make) for name, (makers, _) in CASES.items() for make in makers]


def read(name: str, path: Path, count: int | None = None, seed: int = 0) -> list[Question]:
    return BENCHMARKS[name].read(path, count, seed, "reason")


@pytest.mark.parametrize(
    ("name", "make"), LAYOUTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_published_layout(tmp_path, name, make):
    make(tmp_path)
    questions = read(name, tmp_path)
    wanted = CASES[name][1]
    assert len(questions) == len(wanted)
    for question, (shown, own_id, answer, rule, tolerance, choices, part) in zip(
        questions, wanted, strict=True
    ):
        # The second row of MMBench's TSV shows the picture of the first.
        if shown is None:
            shown = 1 if make is copies.mmbench_tsv else 2
        assert red(question) == shown
        assert own_id is None or question.id in (own_id, str(int(own_id)))
        assert (question.answer, question.rule, question.choices) == (answer, rule, choices)
        assert question.tolerance == pytest.approx(tolerance)
        assert part in question.text
        assert '"Answer: X"' in question.text
        assert is_right(question, f"Let me see.\nAnswer: {answer}") is True
        assert is_right(question, "Answer: something else") is False


def test_all_seven_are_there():
    assert list(BENCHMARKS) == list(CASES)


def test_pictures_of_parquet_files_stay_there(tmp_path):
    copies.mmstar(tmp_path)
    for question in read("MMStar", tmp_path):
        assert isinstance(question.images[0], StoredImage)


def test_a_file_can_be_named_itself(tmp_path):
    copies.dynamath(tmp_path)
    (only,) = read("DynaMath", tmp_path / "data" / "sample10-00000-of-00001.parquet")
    assert only.answer == "2.667"


def test_direct_style_asks_for_the_answer_alone(tmp_path):
    copies.mmstar(tmp_path)
    (first, _) = BENCHMARKS["MMStar"].read(tmp_path, None, 0, "direct")
    assert first.text.endswith(f"Answer with {LETTER} and nothing else.")
    assert "step by step" not in first.text


def test_a_draw_of_questions_is_that_of_its_seed(tmp_path):
    rows = [{"index": n, "question": "x", "answer": "A", "image": copies.png(n)} for n in range(30)]
    copies.parquet(tmp_path / "mmstar.parquet", rows)
    first, again, other = (read("MMStar", tmp_path, 5, seed) for seed in (0, 0, 1))
    assert [q.id for q in first] == [q.id for q in again]
    assert [q.id for q in first] != [q.id for q in other]
    assert [int(q.id) for q in first] == sorted(int(q.id) for q in first)
    assert [red(q) for q in first] == [int(q.id) for q in first]
    assert len(read("MMStar", tmp_path, 100)) == 30


def test_answers_that_are_not_published_are_nobodys(tmp_path):
    copies.mmbench(tmp_path)
    (question,) = read("MMBench", tmp_path / "en" / "test-00000-of-00001.parquet")
    assert question.answer is None
    assert is_right(question, "Answer: A") is None


@pytest.mark.parametrize("name", CASES)
def test_an_empty_folder_is_told_what_belongs_there(tmp_path, name):
    with pytest.raises(BenchmarkError) as caught:
        read(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name}: {tmp_path} holds none of {BENCHMARKS[name].files[0]}")
    assert f"Download {BENCHMARKS[name].source}" in message
    with pytest.raises(BenchmarkError, match="there is no folder or file"):
        read(name, tmp_path / "none")


@pytest.mark.parametrize("name", CASES)
def test_another_layout_is_told_its_columns(tmp_path, name):
    file = tmp_path / "x.parquet"
    copies.parquet(file, [{"caption": "x", "image": copies.stored(1)}])
    with pytest.raises(BenchmarkError) as caught:
        read(name, file)
    message = str(caught.value)
    assert f"{name}: {file} lacks the columns " in message
    for spellings in BENCHMARKS[name].columns.values():
        assert " or ".join(spellings) in message
    assert "it has caption, image" in message


def test_missing_parts_are_named(tmp_path):
    copies.chartqa(tmp_path)
    next((tmp_path / "data").glob("test-00001-*")).unlink()
    with pytest.raises(
        BenchmarkError, match=r"holds 1 of 2 parts, test-00001-of-00002\* is missing"
    ):
        read("ChartQA", tmp_path)


def test_one_of_two_files_is_half_a_benchmark(tmp_path):
    copies.chartqa_release(tmp_path)
    (tmp_path / "ChartQA Dataset" / "test" / "test_human.json").unlink()
    with pytest.raises(BenchmarkError, match=r"ChartQA: .*/test lacks test_human.json. Download"):
        read("ChartQA", tmp_path)


@pytest.mark.parametrize(
    ("name", "make", "gone", "fix"),
    [
        ("ChartQA", copies.chartqa_release, "ChartQA Dataset/test/png", "the folder test/png"),
        ("CharXiv", copies.charxiv_json, "images", "images.zip"),
        ("MathVista", copies.mathvista_json, "images", "images.zip"),
        ("MathVerse", copies.mathverse_json, "images", "images.zip"),
    ],
)
def test_missing_pictures_are_named(tmp_path, name, make, gone, fix):
    make(tmp_path)
    shutil.rmtree(tmp_path / gone)
    count = len(CASES[name][1])
    with pytest.raises(BenchmarkError) as caught:
        read(name, tmp_path)
    message = str(caught.value)
    assert f"{count} of {count} questions have no picture, the first {tmp_path}" in message
    assert f"Unpack {fix}" in message


def test_a_row_that_makes_no_sense_is_left_out_by_name(tmp_path, caplog):
    copies.dynamath(tmp_path)
    file = tmp_path / "data" / "sample1-00000-of-00001.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[0]["answer_type"] = "essay"
    rows[1]["question"] = None
    copies.parquet(file, rows)
    (question,) = read("DynaMath", tmp_path)
    assert question.id == "3"
    assert "row 1: answer_type is 'essay', expected float" in caplog.text
    assert "row 2: it has no question" in caplog.text
    copies.parquet(file, rows[:2])
    with pytest.raises(BenchmarkError, match="no row makes a question, the first"):
        read("DynaMath", tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "json", "tsv", "zip"])
def test_damaged_files_are_named(tmp_path, kind):
    file = tmp_path / f"x.{kind}"
    file.write_bytes(b"\xff\xfenothing")
    with pytest.raises(BenchmarkError, match=str(file)):
        read("MMStar", file)


def test_a_damaged_row_group_is_an_error_and_no_short_benchmark(tmp_path):
    copies.mmstar(tmp_path)
    file = tmp_path / "mmstar.parquet"
    content = bytearray(file.read_bytes())
    # The first picture's page; the footer stays whole.
    at = content.index(copies.png(1)[:8])
    content[at - 40 : at + 40] = bytes(80)
    file.write_bytes(content)
    with pytest.raises(BenchmarkError, match=r"mmstar.parquet is damaged in row group 0"):
        read("MMStar", tmp_path)


def test_names_and_paths():
    assert split_name("chartqa=data/x") == ("ChartQA", Path("data/x"))
    assert split_name("charts") == ("charts", None)
    with pytest.raises(BenchmarkError, match="there is no benchmark 'VQA'; known are charts, Char"):
        split_name("VQA=x")
    with pytest.raises(BenchmarkError, match="expected MMStar=FOLDER, a local copy"):
        split_name("MMStar")
    with pytest.raises(BenchmarkError, match="it is bundled: no path"):
        split_name("charts=x")


def test_bundled_charts_are_drawn_by_seed():
    first, again = (read_questions("charts", None, count=4, seed=3, style="reason") for _ in "12")
    assert [q.text for q in first] == [q.text for q in again]
    assert len({q.text for q in first}) > 1
    assert all(q.answer and is_right(q, f"So. Answer: {q.answer}") for q in first)
