"""The evaluation from questions to records: what is measured, kept, refused and told."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import DFlash
from mmflash_jax.engine.offline import Answers
from mmflash_jax.engine.planning import cache_bytes
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.evaluation import __main__ as command
from mmflash_jax.evaluation import harness, workload
from mmflash_jax.evaluation.batch import load
from mmflash_jax.evaluation.benchmarks import BenchmarkError
from mmflash_jax.evaluation.evaluate_config import EvaluateConfig
from mmflash_jax.evaluation.harness import evaluate
from mmflash_jax.evaluation.in_flight import shape_for
from mmflash_jax.evaluation.methods import load_methods, name_methods
from mmflash_jax.evaluation.records import Record
from mmflash_jax.weights.hf_config import ConfigError
from tests.evaluation import copies


@pytest.fixture
def config(tmp_path: Path, small_pair: dict[str, str]) -> EvaluateConfig:
    """A two-layer random pair on two charts, few tokens."""
    return EvaluateConfig(
        target=small_pair["target"],
        methods=(f"random={small_pair['draft']}",),
        concurrency=(2,),
        questions=2,
        max_tokens=12,
        repeats=2,
        output=tmp_path / "out",
    )


def stored(config: EvaluateConfig) -> list[Record]:
    """The records file without its header."""
    lines = (config.output / "records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def cells(records: list[Record]) -> list[tuple[str, str, int]]:
    return [(r["method"], r["benchmark"], r["concurrency"]) for r in records]


@pytest.mark.slow
def test_demo_charts_from_end_to_end(tmp_path, monkeypatch, capsys):
    """The command itself, on the trained demo pair, one and three in flight."""
    flags = (
        "--target demo --benchmarks charts --concurrency 1 3 --questions 4 --max-tokens 160 "
        f"--repeats 1 --output {tmp_path}"
    )
    monkeypatch.setattr("sys.argv", ["evaluation", *flags.split()])
    monkeypatch.setattr("mmflash_jax.compilation.keep_compiled_programs", lambda: None)
    assert command.main() == 0
    printed = capsys.readouterr().out
    records = [json.loads(x) for x in (tmp_path / "records.jsonl").read_text().splitlines()[1:]]
    drafted = [r for r in records if r["method"] == "qwen35-mmflash"]
    plain = [r for r in records if r["method"] == "none"]
    assert [r["concurrency"] for r in drafted] == [r["concurrency"] for r in plain] == [1, 3]
    for one, alone in zip(drafted, plain, strict=True):
        assert one["parity"] is alone["parity"] is True
        assert one["rows_equal"] == alone["rows_equal"] == one["questions"] == 4
        assert one["accuracy"] == alone["accuracy"] == 1.0
        assert one["mean_answer_tokens"] == alone["mean_answer_tokens"] > 20
        assert one["tau"] == pytest.approx(1 + sum(one["accepted_per_position"]))
        assert len(one["accepted_per_position"]) == one["block"] - 1 == 15
        assert one["tau"] > 5 > alone["tau"] == 1.0
        assert one["plain_tokens_per_s"] == alone["tokens_per_s"] > 0
        assert one["speedup"] == pytest.approx(one["tokens_per_s"] / alone["tokens_per_s"])
        assert alone["speedup"] == 1.0
        assert f"| {one['concurrency']} | {one['tokens_per_s']:,.0f} (" in printed
        assert one["device"] == "4 x cpu (x86_64)" or "cpu" in one["device"]
        assert {"jax", "python"} <= set(one["versions"])
        assert one["seed"] == 0
    # What is said does not depend on how many are in flight.
    assert drafted[0]["tau"] == drafted[1]["tau"]
    assert "**Measured on a CPU**" in printed
    assert (tmp_path / "tables.md").read_text() == printed
    for name in ("demo_tau.png", "demo_speedup.png", "demo_positions.png", "records.csv"):
        assert (tmp_path / name).stat().st_size > 500


def test_a_killed_run_keeps_finished_cells(config, monkeypatch):
    """Cells are written as they end; later runs measure what lacks, also for what was added."""
    asked: list[tuple[list[str], int]] = []
    real = harness.take_turns

    def counted(sessions: Any, asked_: Any, slots: int, repeats: int) -> Any:
        if slots == 3 and not asked[1:]:
            asked.append((list(sessions), slots))
            raise KeyboardInterrupt
        asked.append((list(sessions), slots))
        return real(sessions, asked_, slots, repeats)

    monkeypatch.setattr(harness, "take_turns", counted)
    both = dataclasses.replace(config, concurrency=(2, 3))
    with pytest.raises(KeyboardInterrupt):
        evaluate(both)
    kept = stored(both)
    assert cells(kept) == [("none", "charts", 2), ("random", "charts", 2)]
    # A line that a kill cut off is measured again.
    with (both.output / "records.jsonl").open("a") as stream:
        stream.write('{"target": ')
    records, failed = evaluate(both)
    assert not failed
    assert records == stored(both)
    assert records[:2] == kept
    assert cells(records[2:]) == [("none", "charts", 3), ("random", "charts", 3)]
    again = dataclasses.replace(both, methods=(*config.methods, f"twin={config.methods[0][7:]}"))
    records, _ = evaluate(again)
    assert cells(records[4:]) == [("twin", "charts", 2), ("twin", "charts", 3)]
    # Plain decoding is measured beside it, in the same run.
    assert asked[-2:] == [(["none", "twin"], 2), (["none", "twin"], 3)]
    assert all(record["speedup"] > 0 for record in records)
    evaluate(again)
    assert len(asked) == 5, "nothing lacked"


def test_the_command_tells_what_it_cannot_begin(monkeypatch, capsys):
    monkeypatch.setattr("mmflash_jax.compilation.keep_compiled_programs", lambda: None)
    monkeypatch.setattr("sys.argv", ["evaluation", "--benchmarks", "VQA=x"])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith("error: there is no benchmark 'VQA'; known are")


@pytest.mark.parametrize("ends", [False, True], ids=["a wrong id", "an answer cut short"])
def test_no_speedup_without_parity(config, monkeypatch, ends, capsys):
    honest = harness.answer_in_flight

    def wrong(plan: Plan, *arguments: Any) -> Answers:
        answers = honest(plan, *arguments)
        if plan.drafter.block > 1:
            ids = answers.completions[1].token_ids
            ids = ids[:-1] if ends else (*ids[:4], ids[4] + 1, *ids[5:])
            answers.completions[1] = dataclasses.replace(answers.completions[1], token_ids=ids)
        return answers

    monkeypatch.setattr(harness, "answer_in_flight", wrong)
    records, failed = evaluate(config)
    assert failed
    plain, drafted = records
    assert plain["parity"] is True
    assert plain["tokens_per_s"] > 0
    assert drafted["parity"] is False
    assert drafted["rows_equal"] == 1
    for name in ("speedup", "tokens_per_s", "tokens_per_s_runs", "plain_tokens_per_s"):
        assert drafted[name] is None, name
    assert drafted["withheld"].startswith("1 of 2 answers are not those of plain decoding")
    place = 11 if ends else 4
    assert f"question 2, differs at token {place}: " in drafted["withheld"]
    assert ("one answer ends there" in drafted["withheld"]) == ends
    assert drafted["tau"] is not None


def test_what_cannot_be_had_is_told_and_the_rest_is_measured(config, tmp_path, caplog):
    copies.mmstar(tmp_path / "mmstar")
    (tmp_path / "empty").mkdir()
    other = tmp_path / "misfit"
    other.mkdir()
    draft = json.loads((Path(config.methods[0][7:]) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(draft | {"hidden_size": 8}))
    records, failed = evaluate(
        dataclasses.replace(
            config,
            methods=(str(other), str(tmp_path / "none-there")),
            benchmarks=(f"ChartQA={tmp_path / 'empty'}", f"MMStar={tmp_path / 'mmstar'}"),
        )
    )
    assert failed
    assert cells(records) == [("none", "MMStar", 2)]
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 3
    assert errors[0].startswith("method misfit is left out: ")
    assert errors[1].startswith("method none-there is left out: ")
    assert "is no short name" in errors[1]
    assert errors[2].startswith(f"ChartQA: {tmp_path / 'empty'} holds none of ")
    assert records[0]["path"] == str(tmp_path / "mmstar")
    assert records[0]["graded"] == 2


def test_numbers_in_flight_that_do_not_fit_are_told(config, monkeypatch, caplog):
    config = dataclasses.replace(config, concurrency=(2, 64), methods=())
    session = load(ServeConfig(target=config.target, draft="none"))
    work = workload.make_workload(config, session, "charts", None)
    needed = sum(cache_bytes(session.plan, shape_for(work.prompts, 2)))
    monkeypatch.setattr(harness, "free_memory", lambda: 4 * needed)
    records, failed = evaluate(config)
    assert failed
    assert cells(records) == [("none", "charts", 2)]
    assert "charts with 64 in flight: 64 rows (--batch) of " in caplog.text


def test_a_question_that_cannot_be_asked_is_left_out(config, tmp_path, caplog):
    rows = [
        {"index": 7, "question": "long " * 400, "answer": "A", "image": copies.png(1)},
        {"index": 8, "question": "Which?", "answer": "A", "image": copies.png(2)},
        {"index": 9, "question": "Which?", "answer": "A", "image": b"no picture"},
    ]
    copies.parquet(tmp_path / "mmstar.parquet", rows)
    records, failed = evaluate(
        dataclasses.replace(
            config, methods=(), questions=9, benchmarks=(f"MMStar={tmp_path}",), max_length=900
        )
    )
    assert not failed
    (only,) = records
    assert only["questions"] == 1
    assert "MMStar: question 7 is left out: the prompt has" in caplog.text
    assert "MMStar: question 9 is left out: " in caplog.text


def test_records_of_other_settings_are_refused(config):
    first, _ = evaluate(dataclasses.replace(config, methods=()))
    with pytest.raises(ConfigError, match=r"with other settings: max_tokens is 12 there and 1 in"):
        evaluate(dataclasses.replace(config, methods=(), max_tokens=1))
    file = config.output / "records.jsonl"
    head, line = file.read_text().splitlines()
    changed = json.loads(line) | {"method": "random", "draft": "another"}
    file.write_text(f"{head}\n{line}\n{json.dumps(changed)}\n")
    with pytest.raises(ConfigError, match=r"has random from another, now it is .*LABEL=DRAFT"):
        evaluate(config)
    assert stored(config) == [*first, changed], "nothing is lost"


def test_methods_are_named_by_label_folder_or_short_name(config):
    assert name_methods(EvaluateConfig()) == {"none": "none", "qwen35-mmflash": "own"}
    named = name_methods(dataclasses.replace(config, methods=("a/x", "org/y", "z=b/x", "none")))
    assert named == {"none": "none", "x": "a/x", "y": "org/y", "z": "b/x"}
    with pytest.raises(ConfigError, match="methods a/x and b/x are both called 'x'"):
        name_methods(dataclasses.replace(config, methods=("a/x", "b/x")))


def test_settings_of_a_draft(config, caplog):
    """Those of serve.py that are a draft's; a wrong one leaves that method out."""
    draft = config.methods[0][7:]
    given = (f"{draft},draft_embedding_scale=2.0", f"a={draft},draft_size=1", f"b={draft},batch=2")
    named = name_methods(dataclasses.replace(config, methods=given))
    assert list(named)[2:] == ["a", "b"]
    loaded, failed = load_methods(config, named)
    assert failed
    none, scaled = loaded.values()
    assert none.params["target"] is scaled.params["target"]
    assert isinstance(scaled.plan.drafter, DFlash)
    assert scaled.plan.drafter.config.input_embedding_scale == 2.0
    assert "a draft has no setting 'draft_size'; known are draft_depth, " in caplog.text
    assert "a draft has no setting 'batch'" in caplog.text
    bad = {"none": "none", "c": f"{draft},draft_embedding_scale=much", "d": "own"}
    loaded, failed = load_methods(config, bad)
    assert failed
    assert list(loaded) == ["none"]
    assert f"the target {config.target} brings no draft of its own" in caplog.text
    assert "draft_embedding_scale is 'much', expected a number" in caplog.text


def test_prompts_are_encoded_when_they_are_asked_for(small_pair, monkeypatch):
    monkeypatch.setattr(workload, "KEPT", 2)
    session = load(ServeConfig(**small_pair))
    asked = []
    real = PromptEncoder.encode

    def counted(self, request):
        asked.append(request.text)
        return real(self, request)

    monkeypatch.setattr(PromptEncoder, "encode", counted)
    requests = [Request(text=text, max_tokens=9) for text in "abc"]
    prompts = workload.Prompts(session.encoder, requests, 4096)
    assert len(prompts) == 3
    assert not asked
    assert prompts[0] is prompts[0] is prompts[-3]
    assert asked == ["a"]
    assert [len(prompt.ids) for prompt in prompts] == [len(prompts[0].ids)] * 3
    assert asked == ["a", "b", "c", "a"], "only the last two are kept"
    with pytest.raises(IndexError):
        prompts[3]


def test_a_benchmark_is_named_once(config):
    twice = dataclasses.replace(config, benchmarks=("MMStar=a", "mmstar=b"))
    with pytest.raises(BenchmarkError, match="MMStar is named twice, as a and b"):
        evaluate(twice)
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"questions": 0}, "questions is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"concurrency": (1, 0)}, "concurrency is"),
        ({"concurrency": ()}, "concurrency is"),
    ],
)
def test_settings_without_a_meaning_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        EvaluateConfig(**change)
