"""Tiny local copies of benchmarks in the layouts in which they are published."""

import base64
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from mmflash_jax.engine.images import open_image
from mmflash_jax.evaluation.benchmarks import Question


def png(value: int) -> bytes:
    """A picture that its red tells from others; noise keeps its base64 as long as a real one's."""
    pixels = np.random.default_rng(value).integers(0, 255, (8, 12, 3), np.uint8)
    pixels[0, 0, 0] = value
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def red(question: Question) -> int:
    (image,) = question.images
    return int(np.asarray(open_image(image))[0, 0, 0])


def stored(value: int, path: str | None = None) -> dict[str, Any]:
    """A picture as Hugging Face data sets store it."""
    return {"bytes": png(value), "path": path}


def parquet(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=1)


def tsv(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)


def as_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def picture(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(value))


def text_of(value: int) -> str:
    return base64.b64encode(png(value)).decode()


def chartqa(folder: Path) -> None:
    """HuggingFaceM4/ChartQA: labels are lists."""
    rows = [
        {"image": stored(1), "query": "How many?", "label": ["14"], "human_or_machine": 0},
        {"image": stored(2), "query": "Who?", "label": ["Norway"], "human_or_machine": 1},
    ]
    for shard, row in enumerate(rows):
        parquet(folder / "data" / f"test-0000{shard}-of-00002-e2cd{shard}.parquet", [row])
    parquet(folder / "data" / "train-00000-of-00001.parquet", [{"image": stored(99), "query": "x"}])


def chartqa_lmms(folder: Path) -> None:
    rows = [
        {"type": "human_test", "question": "How many?", "answer": "14", "image": stored(1)},
        {"type": "augmented_test", "question": "Who?", "answer": "Norway", "image": stored(2)},
    ]
    parquet(folder / "data" / "test-00000-of-00001.parquet", rows)


def chartqa_release(folder: Path) -> None:
    """The authors' release: two JSON files beside a folder of pictures."""
    test = folder / "ChartQA Dataset" / "test"
    as_json(
        test / "test_augmented.json", [{"imgname": "a.png", "query": "How many?", "label": "14"}]
    )
    as_json(test / "test_human.json", [{"imgname": "b.png", "query": "Who?", "label": "Norway"}])
    picture(test / "png" / "a.png", 1)
    picture(test / "png" / "b.png", 2)


CHARXIV_ROWS = [
    {"question": "Which line?", "answer": "lambda = 0.13", "kind": 1},
    {"question": "What is the mean?", "answer": "0.25", "kind": 4},
]


def charxiv(folder: Path) -> None:
    rows = [
        {
            "image": stored(number),
            "figure_path": f"images/{number}.jpg",
            "original_id": f"2004.1095{number}",
            "reasoning_q": row["question"],
            "reasoning_a": row["answer"],
            "reasoning_q_source": 3,
            "reasoning_a_type": row["kind"],
            "descriptive_q1": 7,
            "descriptive_a1": "60",
            "subplot_loc": None,
        }
        for number, row in enumerate(CHARXIV_ROWS, start=1)
    ]
    parquet(folder / "val.parquet", rows)
    parquet(folder / "test.parquet", rows[:1])


def charxiv_json(folder: Path) -> None:
    """The authors' repository; the pictures are the unpacked images.zip."""
    entries = {
        str(number): {
            "figure_id": number,
            "query": row["question"],
            "answer": row["answer"],
            "inst_category": row["kind"],
            "qa_source": 3,
        }
        for number, row in enumerate(CHARXIV_ROWS, start=1)
    }
    as_json(folder / "data" / "reasoning_val.json", entries)
    for number in (1, 2):
        picture(folder / "images" / f"{number}.jpg", number)


MMSTAR_ROWS = [
    {"index": 0, "question": "Which?\nOptions: A: red, B: blue, C: none, D: all", "answer": "B"},
    {"index": 1, "question": "Where?\nOptions: A: here, B: there, C: up, D: down", "answer": "D"},
]


def mmstar(folder: Path) -> None:
    meta = {"source": "MMBench", "split": "val", "image_path": "images/0.jpg"}
    parquet(
        folder / "mmstar.parquet",
        [
            row | {"image": png(number), "category": "x", "l2_category": "y", "meta_info": meta}
            for number, row in enumerate(MMSTAR_ROWS, start=1)
        ],
    )


def mmstar_tsv(folder: Path) -> None:
    rows = [row | {"image": text_of(number)} for number, row in enumerate(MMSTAR_ROWS, start=1)]
    tsv(folder / "MMStar.tsv", rows)


MMBENCH_ROWS = [
    {"index": 241, "question": "Which?", "hint": "Look.", "A": "red", "B": "blue", "C": "green",
     "D": "none", "answer": "A"},
    {"index": 1000241, "question": "Where?", "hint": "nan", "A": "here", "B": "there", "C": "nan",
     "D": "nan", "answer": "B"},
]  # fmt: skip


def mmbench(folder: Path) -> None:
    rows = [
        row | {"image": stored(number), "category": "x", "L2-category": "y", "split": "dev"}
        for number, row in enumerate(MMBENCH_ROWS, start=1)
    ]
    parquet(folder / "en" / "dev-00000-of-00001.parquet", rows)
    parquet(folder / "en" / "test-00000-of-00001.parquet", [rows[0] | {"answer": None}])


def mmbench_tsv(folder: Path) -> None:
    """VLMEvalKit's file: empty cells, and a picture that an earlier row has."""
    rows = [
        {name: "" if value == "nan" else value for name, value in row.items()}
        for row in MMBENCH_ROWS
    ]
    rows[0] |= {"l2-category": "y", "image": text_of(1)}
    rows[1] |= {"l2-category": "y", "image": "241"}
    tsv(folder / "MMBench_DEV_EN.tsv", rows)


def dynamath(folder: Path) -> None:
    rows = [
        {"id": "1", "question": "How far?", "ground_truth": "2.667", "answer_type": "float"},
        {"id": "2", "question": "Which? choice: (A) 1 (B) 2", "ground_truth": "B",
         "answer_type": "multiple choice"},
        {"id": "3", "question": "What?", "ground_truth": "even", "answer_type": "text"},
    ]  # fmt: skip
    rows = [
        row | {"image": f"images/{n}.png", "decoded_image": stored(n), "subject": "x"}
        for n, row in enumerate(rows, start=1)
    ]
    parquet(folder / "data" / "sample1-00000-of-00001.parquet", rows)
    parquet(folder / "data" / "sample10-00000-of-00001.parquet", rows[:1])


MATHVISTA_ROWS = [
    {"pid": "1", "question": "How many?", "choices": None, "unit": None, "precision": None,
     "answer": "4", "question_type": "free_form", "answer_type": "integer"},
    {"pid": "2", "question": "How long?", "choices": None, "unit": "cm", "precision": 1.0,
     "answer": "1.2", "question_type": "free_form", "answer_type": "float"},
    {"pid": "3", "question": "Which?", "choices": ["Yes", "No"], "unit": None, "precision": None,
     "answer": "No", "question_type": "multi_choice", "answer_type": "text"},
]  # fmt: skip


def mathvista(folder: Path) -> None:
    rows = [
        row
        | {"image": f"images/{n}.jpg", "decoded_image": stored(n), "query": "Hint: ...",
           "metadata": {"category": "x", "grade": "y"}}
        for n, row in enumerate(MATHVISTA_ROWS, start=1)
    ]  # fmt: skip
    parquet(folder / "data" / "testmini-00000-of-00001-725687bf.parquet", rows)


def mathvista_json(folder: Path) -> None:
    """The authors' repository: an object by problem id, pictures in the unpacked images.zip."""
    entries = {row["pid"]: row | {"image": f"images/{row['pid']}.jpg"} for row in MATHVISTA_ROWS}
    as_json(folder / "data" / "testmini.json", entries)
    for number in (1, 2, 3):
        picture(folder / "images" / f"{number}.jpg", number)


MATHVERSE_ROWS = [
    {"sample_index": "1", "problem_index": "1", "problem_version": "Text Dominant",
     "question": "Find x.\nChoices:\nA:65\nB:55", "answer": "A", "question_type": "multi-choice"},
    {"sample_index": "2", "problem_index": "1", "problem_version": "Vision Only",
     "question": "", "answer": "y=2x", "question_type": "free-form"},
]  # fmt: skip


def mathverse(folder: Path) -> None:
    rows = [
        row | {"image": stored(n), "query_wo": "...", "query_cot": "..."}
        for n, row in enumerate(MATHVERSE_ROWS, start=1)
    ]
    parquet(folder / "testmini.parquet", rows)
    parquet(folder / "testmini_text_only.parquet", [{"question": "x", "answer": "1"}])


def mathverse_json(folder: Path) -> None:
    rows = [
        row | {"image": f"images_version_1-4/image_{n}.png"}
        for n, row in enumerate(MATHVERSE_ROWS, start=1)
    ]
    as_json(folder / "testmini.json", rows)
    for number in (1, 2):
        picture(folder / "images" / "images_version_1-4" / f"image_{number}.png", number)
