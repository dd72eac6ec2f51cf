"""The batch tool from file to files, on the demo pairs and on a small random one."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.engine.offline import Answers
from mmflash_jax.evaluation import batch
from mmflash_jax.evaluation.batch import run
from mmflash_jax.registry import DEMO

SAMPLES = DEMO / "samples"
Rows = list[dict[str, Any]]
Tool = Callable[..., tuple[int, Rows, dict[str, Any]]]


@pytest.fixture
def tool(tmp_path: Path, small_pair: dict[str, str]) -> Tool:
    """Run the tool, on the small pair unless told otherwise.

    Returns its exit code, the answer rows and the report.
    """

    def call(**options: Any) -> tuple[int, Rows, dict[str, Any]]:
        output, report = tmp_path / "answers.jsonl", tmp_path / "report.json"
        config = ServeConfig(**{**small_pair, "output": output, "report": report, **options})
        code = run(config)
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        return code, rows, json.loads(report.read_text())

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[[str], Path]:
    """Write a prompt file in a folder of its own, beside a chart."""

    def write(content: str) -> Path:
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        (folder / "chart.png").write_bytes((SAMPLES / "bar_yield.png").read_bytes())
        path = folder / "prompts.jsonl"
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("target", ["demo", "demo-gemma4"])
def test_a_bundled_pair_answers_the_bundled_samples(tool, capsys, target):
    code, rows, report = tool(target=target, draft=None, batch=4)
    assert code == 0
    samples = [json.loads(line) for line in (SAMPLES / "prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [sample["id"] for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        assert set(row) == {"id", "text", "token_ids", "tau", "finish_reason", "usage"}
        assert row["text"].endswith(f"Answer: {sample['answer']}")
        assert row["finish_reason"] == "stop"
        generated = len(row["token_ids"])
        prompt = row["usage"]["prompt_tokens"]
        # Every chart takes 70 image tokens.
        assert prompt > 70
        assert row["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }

    printed = capsys.readouterr().out
    places = [printed.index(f"[{sample['id']}] {sample['text']}") for sample in samples]
    assert places == sorted(places)
    assert printed.count("ids equal plain decoding") == 8
    assert "8 of 8 rows equal plain decoding" in printed
    for title in ("tau (", "acceptance by position", "tokens/s with the draft", "tokens/s plain"):
        assert printed.count(title) == 1

    check_report(report)
    assert report["prompts"] == report["rows_equal"] == 8
    assert report["accuracy"] == 1.0
    assert report["accuracy_blank_image"] <= 0.25
    assert report["tau"] >= 3.0
    assert all(row["tau"] > 1.0 for row in rows)


def check_report(report: dict[str, Any]) -> None:
    """Fields and types that readers of the file rely on, of a run with a draft and plain."""
    assert report["parity"] is True
    assert report["divergences"] == []
    assert len(report["accepted_per_position"]) == 15
    shares = report["accepted_per_position"]
    assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise(shares))
    assert report["tau"] == pytest.approx(1 + sum(shares))
    for name in ("tokens_per_s", "plain_tokens_per_s", "accuracy", "accuracy_blank_image"):
        assert isinstance(report[name], float), name
    assert report["tokens_per_s"] > 0
    assert report["dtype"] == "float32"
    assert jax.devices()[0].device_kind in report["device"]
    assert {"python", "mmflash-jax", "jax", "flax", "transformers"} <= set(report["versions"])
    assert report["versions"]["jax"] == jax.__version__


def test_ids_depend_neither_on_batch_nor_on_draft_nor_on_run(tool, prompts):
    """A random draft, in batches smaller than, as large as and larger than the number of prompts.

    The rows differ in length and in pictures; the batch of two leaves a row without a request.
    """
    path = prompts(
        '{"text": "Which one is second?", "images": ["chart.png"]}\n'
        '{"text": "Hi"}\n'
        '{"text": "Add MOR and GRA.", "images": ["chart.png", "chart.png"], "max_tokens": 9}\n'
    )
    options = {"max_tokens": 40}
    seen = {}
    for size in (2, 3, 8):
        code, rows, _ = tool(prompts=path, batch=size, plain=False, **options)
        assert code == 0
        seen[f"batch {size}"] = rows
    seen["again"] = tool(prompts=path, batch=8, plain=False, **options)[1]
    code, rows, report = tool(prompts=path, plain=False, **{**options, "draft": "none"})
    assert code == 0
    assert report["tau"] == 1.0
    assert report["accepted_per_position"] == []
    seen["no draft"] = rows
    ids = {name: [row["token_ids"] for row in rows] for name, rows in seen.items()}
    assert ids["batch 2"] == ids["batch 3"] == ids["batch 8"] == ids["no draft"]
    assert seen["again"] == seen["batch 8"], "the same run twice"
    assert [len(row) for row in ids["batch 2"]][2] == 9


def test_one_token_takes_no_verify_step(tool, prompts):
    code, rows, report = tool(prompts=prompts('{"text": "Hi"}\n'), max_tokens=1)
    assert code == 0
    assert len(rows[0]["token_ids"]) == 1
    assert rows[0]["tau"] is None
    assert report["tau"] is None
    assert report["parity"] is True
    assert report["accuracy"] is None, "no line brings an answer"


def test_without_the_plain_run_nothing_is_claimed(tool, prompts, capsys):
    path = prompts('{"text": "Hi", "answer": "4"}\n')
    code, _, report = tool(prompts=path, max_tokens=9, plain=False)
    assert code == 0
    assert report["parity"] is None
    assert report["rows_equal"] is None
    assert report["plain_tokens_per_s"] is None
    assert report["accuracy"] == 0.0
    assert report["accuracy_blank_image"] is None, "there is no image to blank"
    assert "plain decoding" not in capsys.readouterr().out


def test_the_cache_limits_an_answer_but_not_silently_a_prompt(tool, prompts, caplog):
    path = prompts(f'{{"text": "Hi"}}\n{{"text": "{"long " * 40}"}}\n')
    code, rows, _ = tool(prompts=path, max_length=30, max_tokens=100)
    assert code == 1
    assert rows[0]["finish_reason"] in ("length", "stop")
    assert rows[0]["usage"]["total_tokens"] <= 30
    assert set(rows[1]) == {"id", "error"}
    assert rows[1]["error"].startswith(f"{path}:2: the prompt has ")
    assert (
        "the cache holds 30 with the answer (--max-length, up to the model's own limit)"
        in rows[1]["error"]
    )


@pytest.mark.parametrize("ends", [False, True], ids=["a wrong id", "an answer cut short"])
def test_answers_of_a_wrong_verifier_fail_the_run(tool, prompts, monkeypatch, capsys, ends):
    """A16: such a run must not look like a fast one."""
    honest = batch.answer_backlog

    def wrong(plan: Plan, *arguments: Any, **options: Any) -> Answers:
        answers = honest(plan, *arguments, **options)
        if plan.drafter.block > 1:
            ids = answers.completions[0].token_ids
            ids = ids[:-1] if ends else (*ids[:4], ids[4] + 1, *ids[5:])
            answers.completions[0] = dataclasses.replace(answers.completions[0], token_ids=ids)
        return answers

    monkeypatch.setattr(batch, "answer_backlog", wrong)
    code, rows, report = tool(prompts=prompts('{"text": "Hi"}\n'), max_tokens=9)
    assert code == 1
    assert rows[0]["token_ids"], "answers are written all the same"
    assert report["parity"] is False
    assert report["tokens_per_s"] is report["plain_tokens_per_s"] is None
    (divergence,) = report["divergences"]
    assert divergence["explained"] is False
    printed = capsys.readouterr().out
    assert "NOT A TIE" in printed
    assert "PARITY FAILED" in printed
    assert "speed-up" not in printed


@pytest.mark.parametrize("option", ["output", "report"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tool, tmp_path, option, capsys):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tool(**{option: tmp_path / "none" / "file"})
    assert capsys.readouterr().out == ""
