"""The command line of the batch tool: flags, messages and exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import serve
from mmflash_jax.registry import DEMO
from tests.drafts import random_draft

ROOT = Path(__file__).parent.parent
HI = '{"text": "Hi"}\n'


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Call the script's main function with flags, without its compilation cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmflash_jax.compilation.keep_compiled_programs", lambda: None)

    def call(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["serve.py", *flags])
        return serve.main()

    return call


@pytest.mark.parametrize(
    ("script", "shown"),
    [("serve.py", ("--target", "--no-plain", "Rows decoded at once")), ("train.py", ("--config",))],
)
def test_help_answers_at_once_and_names_the_options(script, shown):
    done = subprocess.run(
        [sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True
    )
    for text in shown:
        assert text in done.stdout
    # Nothing heavy was imported for it.
    assert done.stderr == ""


def test_a_prompt_file_is_answered(main, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(HI)
    flags = ["--prompts", "in.jsonl", "--output", "out.jsonl", "--report", "report.json"]
    assert main("--draft", "none", "--no-plain", "--max-tokens", "3", "--batch", "2", *flags) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert row["usage"]["completion_tokens"] <= 3
    assert json.loads((tmp_path / "report.json").read_text())["parity"] is None
    assert "[1] Hi" in capsys.readouterr().out


def test_a_bad_line_gives_exit_code_one(main, tmp_path, caplog):
    (tmp_path / "in.jsonl").write_text(HI + '{"text": 3}\n')
    assert main("--draft", "none", "--no-plain", "--max-tokens", "3", "--prompts", "in.jsonl") == 1
    assert "in.jsonl:2: text is 3, expected str" in caplog.text


def broken(folder: Path, change: str) -> None:
    """A copy of the demo target with one thing wrong."""
    folder.mkdir()
    for file in (DEMO / "qwen35").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if change == "no template":
        (folder / "chat_template.jinja").unlink()
    elif change == "truncated weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    elif change == "no weights":
        (folder / "model.safetensors").unlink()
    elif change == "no config":
        (folder / "config.json").unlink()
    elif change == "broken config":
        (folder / "config.json").write_text("{")
    elif change == "other family":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no template", "has no chat template"),
        ("truncated weights", "is truncated"),
        ("no weights", "holds neither model.safetensors nor"),
        ("no config", "config.json does not exist"),
        ("broken config", "is not valid JSON"),
        ("other family", "architectures is ['Other'], known here: ['Gemma4For"),
    ],
)
def test_a_broken_checkpoint_gives_one_message_and_exit_code_two(
    main, tmp_path, capsys, change, message
):
    broken(tmp_path / "target", change)
    assert main("--target", "target") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_draft_of_another_target_is_refused(main, tmp_path, qwen35, capsys):
    random_draft(tmp_path / "draft", qwen35.folder)
    assert main("--draft", "draft") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: draft and target do not fit: ")
    for text in ("hidden_size: draft 64, target 192", "vocab_size: draft 288, target 704"):
        assert text in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--prompts", "empty.jsonl"], "empty.jsonl holds no prompts"),
        (["--prompts", "files"], "files: no .jsonl or .parquet files there"),
        (["--target", "neither/a/name"], "'neither/a/name' is no short name (demo, demo-gemma4, "),
        (["--draft", "no-such-draft"], "'no-such-draft' is no short name"),
        (["--output", "none/out.jsonl"], "there is no folder none"),
    ],
)
def test_what_cannot_start_gives_one_message_and_exit_code_two(
    main, tmp_path, capsys, flags, message
):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "files").mkdir()
    assert main(*flags) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bach", "3"], "--batch"),
        (["--batch", "many"], "--batch"),
        (["--dtype", "float8"], "--dtype"),
        (["--temperature", "-1"], "temperature is -1.0, must be from 0 to 100"),
        (["--batch", "0"], "batch is 0, it must be positive"),
        (["--max-tokens", "-1"], "max_tokens is -1, it must be positive"),
    ],
)
def test_a_wrong_flag_is_named(main, capsys, flags, message):
    try:
        code = main(*flags)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert "Traceback" not in printed.err
