"""The demo's tables: what is done first, what is kept, what is refused, what the tables say."""

import dataclasses
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_settings, demo_stages, demo_tables, demo_tables_report
from benchmarks.demo_settings import Settings, draft_path, keep_settings, prepared_path
from benchmarks.jobs import Job, run_jobs
from mmflash_jax.evaluation import harness
from mmflash_jax.registry import PAIRS, Pair
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafts import random_draft, two_layer_target

FACTS = {"lambda": 0.0, "steps": 7, "batch": 4, "training_prompts": 24}


def command(name: str, code: str, *after: str) -> Job:
    return Job(name, ("-c", code), after)


def test_jobs_run_in_order_and_a_failure_costs_only_what_needs_it(tmp_path, caplog):
    note = f"open({str(tmp_path / 'order')!r}, 'a').write"
    jobs = [
        command("bad", "print('why it failed'); raise SystemExit(3)"),
        command("first", f"import time; time.sleep(0.3); {note}('first ')"),
        command("needs bad", f"{note}('never ')", "bad"),
        command("needs both", f"{note}('never ')", "first", "needs bad"),
        command("second", f"{note}('second ')", "first"),
        command("variable", f"import os; {note}(os.environ['SAID'] + ' ')", "second"),
    ]
    done = run_jobs(jobs, at_once=2, logs=tmp_path / "logs", environment={"SAID": "last"})
    assert list(done) == ["first", "second", "variable"]
    assert (tmp_path / "order").read_text() == "first second last "
    assert "why it failed" in (tmp_path / "logs" / "bad.log").read_text()
    assert "needs both is left out: it needs first and needs bad" in caplog.text


def test_jobs_end_when_time_is_out(tmp_path, caplog):
    """What had ended is told, and no process is left."""
    mark = tmp_path / "mark"
    late = f"import time; time.sleep(5); open({str(mark)!r}, 'w')"
    jobs = [command("quick", ""), command("late", late), command("waiting", "", "late")]
    began = time.monotonic()
    done = run_jobs(jobs, at_once=2, logs=tmp_path, environment={}, until=began + 1.0)
    assert list(done) == ["quick"]
    assert time.monotonic() - began < 4
    assert "out of time: late, waiting" in caplog.text
    assert not mark.exists()


def test_only_what_lacks_is_begun_seed_by_seed(tmp_path):
    everything = [job.name for job in demo_tables.jobs_of(tmp_path, ("demo-gemma4",), (0, 1))]
    assert everything == [
        "prepare-demo-gemma4",
        "compile-demo-gemma4-none", "compile-demo-gemma4-eagle3",
        "compile-demo-gemma4-eagle3-tree16", "compile-demo-gemma4-dflash",
        "train-demo-gemma4-dflash-0", "train-demo-gemma4-eagle3-0",
        "train-demo-gemma4-dflash-1", "train-demo-gemma4-eagle3-1",
    ]  # fmt: skip
    whole = demo_tables.jobs_of(tmp_path, ("demo", "demo-gemma4"), (0,))
    assert {job.after for job in whole if job.name.startswith("train-demo-")} == {
        ("prepare-demo",), ("prepare-demo-gemma4",)
    }  # fmt: skip
    prepared_path(tmp_path, "demo").parent.mkdir(parents=True)
    prepared_path(tmp_path, "demo").touch()
    for draft in ("dflash", "mtp", "eagle3"):
        draft_path(tmp_path, "demo", draft, 0).mkdir(parents=True)
    # A folder in the making is none, and one of two drafts that are trained together is not both.
    draft_path(tmp_path, "demo", "mmflash", 0).with_name("mmflash-0.part").mkdir()
    left = demo_tables.jobs_of(tmp_path, ("demo",), (0,))
    assert [job.name for job in left if "compile" not in job.name] == ["train-demo-dflash-0"]
    assert left[-1].after == ()


def test_a_folder_has_one_set_of_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one")
    settings = Settings(steps=7, concurrency=(2, 3))
    keep_settings(tmp_path / "new", settings)
    keep_settings(tmp_path / "new", settings)
    assert demo_settings.settings_of(tmp_path / "new") == (settings, "--one")
    with pytest.raises(ConfigError, match=r"steps is 7 there and 8 in the config"):
        keep_settings(tmp_path / "new", dataclasses.replace(settings, steps=8))
    monkeypatch.setenv("XLA_FLAGS", "--two")
    with pytest.raises(ConfigError, match=r"xla_flags is '--one' there"):
        keep_settings(tmp_path / "new", settings)


def test_all_methods_of_a_target_train_on_the_same_rows(tmp_path):
    """The shipped configs differ in the draft and its objective, and in nothing else."""
    keep_settings(tmp_path, Settings(count=24, steps=7, batch=4))
    for target, kinds in demo_settings.CONFIGS.items():
        configs = [demo_settings.train_config(tmp_path, target, kind) for kind in kinds]
        same = [
            dataclasses.replace(c, draft=configs[0].draft, objective=configs[0].objective)
            for c in configs
        ]
        assert same == [configs[0]] * len(configs)
        assert configs[0].optimiser.steps == 7
        assert configs[0].objective.anchors == configs[-1].objective.anchors


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings, and drafts of two seeds that were never trained, for a two-layer target."""
    target = two_layer_target(tmp_path / "target")
    draft = random_draft(tmp_path / "draft", target)
    monkeypatch.setitem(PAIRS, "demo", Pair(str(target), str(draft)))
    monkeypatch.setattr(demo_stages, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(demo_stages, "_keep_all_programs", lambda: None)
    made = tmp_path / "made"
    keep_settings(
        made, Settings(questions=2, max_tokens=6, concurrency=(2,), steps=7, batch=4, count=24)
    )
    for seed in (0, 1):
        put_draft(made, draft, seed)
    return made


def put_draft(folder: Path, draft: Path, seed: int) -> None:
    there = draft_path(folder, "demo", "dflash", seed)
    shutil.copytree(draft, there)
    (there / "training.json").write_text(json.dumps(FACTS))


def test_measured_cells_are_kept_and_told_at_once(folder, tmp_path, monkeypatch):
    """A run that is killed after a cell has it in tables.json; the next one measures the others."""
    asked: list[Any] = []
    real = harness.take_turns

    def counted(sessions: Any, *rest: Any) -> Any:
        asked.append(list(sessions))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(sessions, *rest)

    monkeypatch.setattr(harness, "take_turns", counted)
    with pytest.raises(KeyboardInterrupt):
        demo_stages.measure(folder, tmp_path, ("demo",), (0, 1))
    kept = json.loads((tmp_path / "tables.json").read_text())
    assert [(r["seed"], r["method"]) for r in kept] == [(0, "none"), (0, "dflash")]
    plain, drafted = kept
    assert tuple(drafted)[:10] == demo_tables_report.FIRST
    assert drafted | FACTS == drafted
    assert (drafted["draft"], drafted["question_seed"]) == ("dflash-0", 0)
    assert drafted["parity"] is True
    assert drafted["draft_parameters"] > 1000 > plain["draft_parameters"] == 0
    assert str(tmp_path) not in json.dumps(kept)
    demo_stages.measure(folder, tmp_path, ("demo",), (0, 1), commit="abc")
    assert len(asked) == 3, "the first seed is not measured again"
    records = json.loads((tmp_path / "tables.json").read_text())
    assert [(r["seed"], r["method"]) for r in records] == [
        (0, "none"), (0, "dflash"), (1, "none"), (1, "dflash"),
    ]  # fmt: skip
    assert {r["commit"] for r in records} == {"abc"}
    # What a kill left of a line is no record.
    with (folder / "demo" / "evaluation" / "1" / "records.jsonl").open("a") as stream:
        stream.write('{"target": ')
    assert demo_tables_report.collect(folder, "abc") == records
    demo_stages.report(folder, tmp_path, "abc")
    assert "| dflash | 2 |" in (tmp_path / "tables.md").read_text()
    for name in ("tables_demo_tau.png", "tables_demo_speedup.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_measuring_waits_until_training_has_ended(tmp_path):
    """Whatever is not compiled by then is compiled later."""
    begin = tmp_path / "begin"
    keep_settings(tmp_path, Settings())
    began = time.monotonic()
    threading.Timer(0.7, begin.touch).start()
    demo_stages._make_ready(tmp_path, ("demo", "demo-gemma4"), begin)
    assert 0.6 < time.monotonic() - began < 5


def record(method: str, seed: int, slots: int, **changes: Any) -> dict[str, Any]:
    return {
        "target": "demo", "method": method, "benchmark": "charts", "concurrency": slots,
        "seed": seed, "tau": 2.0 + 2 * seed, "tokens_per_s": 1000.0 + 1000 * seed,
        "speedup": 1.0 + seed, "parity": True, "withheld": None, "draft_parameters": 12345,
        "rows_equal": 3, "questions": 4, "numeric_ties": 1, "accuracy": 0.5,
        "accepted_per_position": [0.5, 0.25], "device": "a card", "dtype": "bfloat16",
        "kernels": "reference", "commit": "abc", "max_tokens": 6, "repeats": 1, "xla_flags": "-x",
        **FACTS, **changes,
    }  # fmt: skip


def test_the_tables_have_mean_and_spread_and_withhold_without_parity():
    lost = {"speedup": None, "tokens_per_s": None, "parity": False, "withheld": "1 of 4 answers"}
    records = [
        record("mtp3", 0, 1), record("mtp3", 1, 1), record("mtp3", 0, 8),
        record("mtp3", 1, 8, **lost), record("none", 0, 1, draft_parameters=0),
    ]  # fmt: skip
    text = demo_tables_report.markdown(records)
    # The sample's standard deviation of 2 and 4 is the root of 2.
    row = next(line for line in text.splitlines() if line.startswith("| mtp3"))
    assert row == (
        "| mtp3 | 2 | 12,345 | 3.00 ± 1.41 | 50.0 % | 12 of 16, 4 left them at a tie "
        "| 1,500 (1.50 ± 0.71) | 1,000 (1.00), withheld in 1 of 2 runs |"
    )
    assert "- mtp3, seed 1, 8 in flight: 1 of 4 answers" in text
    assert text.index("| none") < text.index("| mtp3")
    assert "7 steps of 4 rows" in text
    assert "CPU" not in text
    one = {(r["method"], r["concurrency"]): r for r in demo_tables_report.averages(records)}
    assert one["mtp3", 1]["speedup"] == 1.5
    assert one["mtp3", 8]["speedup"] is None
    with pytest.raises(ValueError, match=r"two records of .*mtp3.*seed 0"):
        demo_tables_report.averages([*records, record("mtp3", 0, 1)])


def test_the_command_refuses_another_setting(tmp_path, monkeypatch, capsys):
    keep_settings(tmp_path, Settings(steps=7))
    monkeypatch.setattr(sys, "argv", ["x", "make", "--folder", str(tmp_path), "--steps", "8"])
    assert demo_tables.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
