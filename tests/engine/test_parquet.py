"""Prompts in parquet files: the forms of Hugging Face data sets, pictures left in the file."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmflash_jax.engine import parquet
from mmflash_jax.engine.images import StoredImage, open_image
from mmflash_jax.engine.prompt_files import Line, prompt_files, read_requests
from mmflash_jax.engine.prompts import PromptError, Request

USER = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 6), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def read(path: Path, **options: Any) -> list[Line]:
    return read_requests(path, max_tokens=7, **options)


def requests(lines: list[Line]) -> list[Request]:
    assert [line.error for line in lines] == [None] * len(lines)
    return [line.request for line in lines if line.request]


def red(request: Request) -> list[int]:
    return [int(np.asarray(open_image(image))[0, 0, 0]) for image in request.images]


def test_pictures_as_bytes_paths_data_urls_and_base64(tmp_path):
    """One column holds one type: structs with bytes or a path, then text of three kinds."""
    (tmp_path / "a.png").write_bytes(png(1))
    text = base64.b64encode(png(3)).decode()
    structs = [{"bytes": None, "path": "a.png"}, {"bytes": png(2), "path": "gone.png"}]
    strings = ["a.png", f"data:image/png;base64,{text}", text]
    for images, values in ((structs, [1, 2]), (strings, [1, 3, 3]), ([png(4)], [4])):
        path = write(tmp_path / "p.parquet", [{"text": "Hi", "images": images}])
        parquet._read_group.cache_clear()
        (request,) = requests(read(path))
        assert (request.text, request.max_tokens, red(request)) == ("Hi", 7, values)


def test_bytes_of_pictures_stay_in_the_file(tmp_path):
    """A request of a parquet or JSON line holds the place of its pictures, not their bytes."""
    rows = [{"text": str(n), "images": [{"bytes": png(n), "path": None}] * 2} for n in range(6)]
    made = requests(read(write(tmp_path / "p.parquet", rows, row_group_size=2)))
    assert [red(request) for request in made] == [[n, n] for n in range(6)]
    url = "data:image/png;base64," + base64.b64encode(png(9)).decode()
    (tmp_path / "p.jsonl").write_text(f'\n{{"text": "é"}}\n{{"images": ["{url}"]}}\n')
    made += requests(read(tmp_path / "p.jsonl"))
    assert red(made[-1]) == [9]
    images = [image for request in made for image in request.images]
    assert all(isinstance(image, StoredImage) for image in images)
    assert parquet._read_group.cache_info().currsize == 1, "more than one row group is held"
    (tmp_path / "p.jsonl").unlink()
    with pytest.raises(ValueError, match=r"p\.jsonl:3, image 1: no such file"):
        open_image(images[-1])


def test_a_row_with_every_column_and_columns_of_others(tmp_path, caplog):
    rows = [
        {"id": 5, "text": "a", "temperature": 0.5, "seed": 3, "source": "web"},
        {"id": None, "text": "b", "temperature": None, "seed": None, "source": "web"},
    ]
    first, second = requests(read(write(tmp_path / "p.parquet", rows)))
    assert (first.id, first.sampling.temperature, first.sampling.seed) == ("5", 0.5, 3)
    assert (second.id, second.sampling.temperature, second.sampling.seed) == ("2", 0.0, 2)
    assert "the columns ['source'] are not read" in caplog.text


def test_conversations_of_hugging_face(tmp_path):
    """Fields that only some parts have are null in the others; the last answer is left out."""
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    again = {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}
    image = {"bytes": png(7), "path": None}
    rows = [
        {"messages": [USER, answer], "images": [image]},
        {"messages": [USER, answer, again, answer], "images": [image]},
    ]
    one, two = requests(read(write(tmp_path / "p.parquet", rows)))
    assert one.text is None
    assert one.messages == [USER]
    assert two.messages == [USER, answer, again]
    assert red(one) == red(two) == [7]


def test_a_folder_and_a_pattern_are_all_files_in_order(tmp_path):
    write(tmp_path / "b.parquet", [{"text": "3"}, {"text": "4"}])
    write(tmp_path / "a.parquet", [{"text": "1"}, {"text": "2"}])
    (tmp_path / "c.jsonl").write_text('{"text": "5"}\n')
    for path in (tmp_path, tmp_path / "*.parquet"):
        lines = read(path, kind="parquet")
        assert [line.request.text for line in lines if line.request] == ["1", "2", "3", "4"]
        # Names and seeds do not begin anew in the second file, places do.
        assert [line.id for line in lines] == ["1", "2", "3", "4"]
        assert len({line.request.sampling.seed for line in lines if line.request}) == 4
        assert lines[3].where == f"{tmp_path / 'b.parquet'} row 2"
    assert [file.name for file in prompt_files(tmp_path)] == ["a.parquet", "b.parquet", "c.jsonl"]
    assert len(read(tmp_path)) == 5
    for path in (tmp_path / "x*.parquet", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(FileNotFoundError, match=r"no \.jsonl files there"):
            read(path, kind="jsonl")


def test_a_bad_row_says_where_and_why(tmp_path):
    rows = [{"text": "a", "images": ["x.png"]}, {"text": "b", "images": ["https://a.b/c.png"]}]
    good, bad = read(write(tmp_path / "p.parquet", rows))
    assert good.request is not None
    assert bad.request is None
    assert bad.error is not None
    assert bad.error.startswith(f"{tmp_path / 'p.parquet'} row 2: 'https://a.b/c.png' is a https")
    assert "fetch the image and give its path" in bad.error


def test_files_that_hold_no_prompts(tmp_path):
    path, empty = tmp_path / "p.parquet", tmp_path / "empty.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), empty)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(PromptError, match=r"p\.parquet is no readable parquet file"):
        read(path)
    with pytest.raises(PromptError, match=r"has the columns \['question'\], prompts need some of"):
        read(write(path, [{"question": "Why?"}]))
    with pytest.raises(PromptError, match="holds no prompts"):
        read(empty)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "gone.parquet")
