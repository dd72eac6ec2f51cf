"""Bad lines among good ones: one error each, the others answered, everything in order."""

import json
from pathlib import Path

import pytest
from PIL import Image

from mmflash_jax.config import ServeConfig
from mmflash_jax.evaluation.batch import run
from mmflash_jax.registry import DEMO

SAMPLES = DEMO / "samples"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A good chart and files that are none."""
    (tmp_path / "chart.png").write_bytes((SAMPLES / "bar_yield.png").read_bytes())
    with Image.open(SAMPLES / "bar_yield.png") as image:
        image.convert("RGB").save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    Image.new("RGB", (1, 4000)).save(tmp_path / "thin.png")
    return tmp_path


# What a line holds, and the error behind FILE:LINE; None for lines that are answered.
LINES = [
    ('{"id": "first", "text": "Größe 삼 👩‍👧?", "images": ["chart.png"]}', None),
    ('{"text": "a", "images": ["none.png"]}', "none.png: no such file"),
    ('{"text": "a", "images": ["cut.jpg"]}', "cut.jpg: cannot be decoded"),
    ('{"text": "a", "images": ["empty.png"]}', "empty.png: is empty (0 bytes)"),
    ('{"text": "a", "images": ["text.png"]}', "text.png: not a readable PNG"),
    ('{"text": "a", "images": ["huge.png"]}', "huge.png: 9000 x 9000 is 81000000 pixels"),
    ('{"text": "a", "images": ["thin.png"]}', "thin.png: 1 x 4000"),
    ('{"text": "a", "images": ["."]}', ": cannot be read (Is a directory)"),
    ('{"text": "a", "images": ["a\\u0000.png"]}', "cannot be read"),
    ('{"text": "a", "images": ["chart.png", "none.png"]}', "none.png: no such file"),
    ("", None),
    ('{"text": ""}', "the prompt is empty"),
    ('{"text": " \\n\\t"}', "the prompt is empty"),
    ("{}", "the prompt is empty"),
    ('{"id": "b", "text": "a", "tokens": 3}', "unknown fields ['tokens']"),
    ('{"id": "b", "text": "a", "max_tokens": 0}', "max_tokens is 0"),
    ('{"id": "b", "text": ', "not valid JSON"),
    ('{"text": "<|image_pad|>"}', "1 image placeholders and the request has 0 images"),
    (json.dumps({"text": "long " * 400}), "tokens, the cache holds 256 with the answer"),
    ('{"images": ["chart.png"]}', None),
    ('{"id": "last", "text": "Hi", "images": ["whole.jpg"], "max_tokens": 99999999999}', None),
]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_bad_lines_are_reported_and_the_rest_is_answered(pictures, small_pair, caplog, end):
    path, output = pictures / "in.jsonl", pictures / "out.jsonl"
    path.write_bytes(end.join(line for line, _ in LINES).encode())
    code = run(
        ServeConfig(
            target=small_pair["target"],
            draft="none",
            plain=False,
            prompts=path,
            output=output,
            max_length=256,
            max_tokens=5,
        )
    )
    assert code == 1
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    wanted = [
        (number, *pair) for number, pair in enumerate(LINES, start=1) if pair[0]
    ]  # Blank lines give no row.
    assert len(rows) == len(wanted)
    errors = []
    for row, (number, line, message) in zip(rows, wanted, strict=True):
        named = line.startswith('{"id": ') and message != "not valid JSON"
        assert row["id"] == (json.loads(line)["id"] if named else str(number))
        if message is None:
            assert set(row) == {"id", "text", "token_ids", "tau", "finish_reason", "usage"}
            assert row["token_ids"]
            continue
        assert set(row) == {"id", "error"}, line
        assert row["error"].startswith(f"{path}:{number}: "), line
        assert message in row["error"], line
        errors.append(row["error"])
    # Each is told once, on one line, without a traceback.
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged == errors
    assert not any("\n" in error or "Traceback" in error for error in errors)


def test_a_file_of_bad_lines_alone(tmp_path, capsys):
    path, output, report = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "report.json"))
    path.write_text("{}\n[]\n")
    code = run(ServeConfig(draft="none", prompts=path, output=output, report=report))
    assert code == 1
    assert [set(json.loads(line)) for line in output.read_text().splitlines()] == [
        {"id", "error"}
    ] * 2
    figures = json.loads(report.read_text())
    assert figures["prompts"] == 0
    assert figures["tau"] is None
    assert figures["accuracy"] is None
    assert "prompts                      0" in capsys.readouterr().out
