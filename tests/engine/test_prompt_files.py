"""Prompt files: good lines become requests, bad ones one error with file and line."""

import json
from pathlib import Path

import pytest

from mmflash_jax.engine.prompt_files import Line, read_requests
from mmflash_jax.engine.prompts import PromptError


def read(tmp_path: Path, content: bytes | str, max_tokens: int = 7) -> list[Line]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_requests(path, max_tokens=max_tokens)


def test_a_line_with_every_field(tmp_path):
    value = {"id": "a", "text": "Hi", "images": ["x.png"], "max_tokens": 3, "answer": "forty-two"}
    (line,) = read(tmp_path, json.dumps(value))
    assert line.error is None
    assert line.answer == "forty-two"
    assert line.request is not None
    assert (line.request.id, line.request.text, line.request.max_tokens) == ("a", "Hi", 3)
    # The expected answer is never in what a model sees.
    assert "forty-two" not in repr(line.request)


def test_what_a_line_may_leave_out(tmp_path):
    lines = read(tmp_path, '{"text": "Hi"}\n{"images": ["x.png"]}\n')
    assert [line.id for line in lines] == ["1", "2"]
    assert [line.request.max_tokens for line in lines if line.request] == [7, 7]
    assert lines[0].request is not None
    assert lines[0].request.images == ()
    assert lines[0].answer is None


def test_ids_are_text_and_default_to_the_line_number(tmp_path):
    lines = read(tmp_path, '\n{"text": "a"}\n{"text": "b", "id": 12}\n{"text": "c", "id": "é"}\n')
    assert [line.id for line in lines] == ["2", "12", "é"]


def test_image_paths_are_relative_to_the_file(tmp_path):
    absolute = str(tmp_path / "elsewhere" / "b.png")
    (line,) = read(tmp_path, json.dumps({"images": ["sub/a.png", absolute]}))
    assert line.request is not None
    assert line.request.images == (tmp_path / "sub" / "a.png", Path(absolute))


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}\n\n  \t \n{"text": "b"}',
        b'{"text": "a"}\r\n\r\n\r\n{"text": "b"}\r\n',
        b'\xef\xbb\xbf{"text": "a"}\n \n\n{"text": "b"}\n',
    ],
    ids=["blank lines, no end of line", "CRLF", "byte order mark"],
)
def test_blank_lines_are_counted_and_skipped(tmp_path, content):
    lines = read(tmp_path, content)
    assert [line.request.text for line in lines if line.request] == ["a", "b"]
    assert [line.where for line in lines] == [
        f"{tmp_path / 'prompts.jsonl'}:1",
        f"{tmp_path / 'prompts.jsonl'}:4",
    ]


def test_text_of_any_script_is_kept(tmp_path):
    text = "Größe 삼겹살 👩‍👩‍👧 \u2028 ∑"
    raw = json.dumps({"text": text}, ensure_ascii=False)
    escaped = json.dumps({"text": text})
    lines = read(tmp_path, f"{raw}\n{escaped}\n")
    assert [line.request.text for line in lines if line.request] == [text, text]


BAD = {
    "not JSON": ('{"text": "a"', "not valid JSON, Expecting ',' delimiter at column 13"),
    "two objects": ('{"text": "a"} {}', "not valid JSON, Extra data at column 15"),
    "too deep": ("[" * 100_000, "not valid JSON, too deeply nested"),
    "no UTF-8": (b'{"text": "\xff"}', "not valid UTF-8 text"),
    "half a character": ('{"text": "\\ud83d"}', "not valid UTF-8 text, surrogates not allowed"),
    "half a character in the id": ('{"id": "\\ud83d"}', "not valid UTF-8 text"),
    "a list": ('["a"]', "expected a JSON object, found list"),
    "a word": ('"a"', "expected a JSON object, found str"),
    "null": ("null", "expected a JSON object, found NoneType"),
    "unknown field": (
        '{"text": "a", "prompt": "b"}',
        "unknown fields ['prompt']; known are ['answer', 'conversations', 'id', 'images', "
        "'max_tokens', 'messages', 'min_p', 'seed', 'stop', 'temperature', 'text', 'top_k', "
        "'top_p']",
    ),
    "a number as text": ('{"text": 3}', "text is 3, expected str"),
    "null as text": ('{"text": null}', "text is None, expected str"),
    "one image without a list": ('{"images": "a.png"}', "images is 'a.png', expected list"),
    "an image that is no name": ('{"images": ["a", 3]}', "images holds 3, expected file names"),
    "a fraction": ('{"text": "a", "max_tokens": 2.5}', "max_tokens is 2.5, expected int"),
    "a flag": ('{"text": "a", "max_tokens": true}', "max_tokens is True, expected int"),
    "no tokens": ('{"text": "a", "max_tokens": 0}', "max_tokens is 0, it must be at least 1"),
    "fewer than none": ('{"text": "a", "max_tokens": -1}', "max_tokens is -1, it must be at least"),
    "a list as id": ('{"id": [1], "text": "a"}', "id is [1], expected str"),
    "a flag as id": ('{"id": true, "text": "a"}', "id is True, expected str"),
    "a number as answer": ('{"text": "a", "answer": 4}', "answer is 4, expected str"),
}


@pytest.mark.parametrize(("raw", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_line_says_where_and_why(tmp_path, raw, message):
    bad = raw.encode() if isinstance(raw, str) else raw
    before, line, after = read(tmp_path, b'{"text": "a"}\n' + bad + b'\n{"text": "b"}\n')
    assert line.request is None
    assert line.error is not None
    assert line.error.startswith(f"{tmp_path / 'prompts.jsonl'}:2: ")
    assert message in line.error
    assert "\n" not in line.error
    # What is reported can be written.
    f"{line.id} {line.error}".encode()
    assert before.request is not None
    assert after.request is not None


def test_a_bad_line_keeps_its_id_where_it_can_be_read(tmp_path):
    lines = read(tmp_path, '{"id": "a", "text": 3}\n{"id": "b"\n')
    assert [line.id for line in lines] == ["a", "2"]


@pytest.mark.parametrize("content", ["", "\n \n\r\n"])
def test_a_file_without_lines(tmp_path, content):
    with pytest.raises(PromptError, match=r"prompts\.jsonl holds no prompts"):
        read(tmp_path, content)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        read_requests(tmp_path / "none.jsonl", max_tokens=1)
