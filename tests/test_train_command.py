"""train.py as a command: flags over the file, signals, export without training, bad prompts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import train
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.weights import TensorStore
from tests.drafts import two_layer_target

ROOT = Path(__file__).parent.parent


def call(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmflash_jax.compilation.keep_compiled_programs", lambda: None)
        patch.setattr(sys, "argv", ["train.py", *arguments])
        return train.main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and a config for a run of text alone, which takes no more steps than it is told."""
    folder = tmp_path_factory.mktemp("command")
    target = two_layer_target(folder / "target")
    lines = [{"text": f"What is {n}?"} for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config: dict[str, Any] = {
        "target": str(target),
        "output": str(folder / "run"),
        "draft": {
            "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "mask_token": "<|video_pad|>",
            "target_layer_ids": [0, 1], "block_size": 4,
        },
        "data": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "held_out": 2},
        "generate": {"batch": 4, "max_tokens": 8},
        "objective": {"anchors": 4},
        "optimiser": {"steps": 50000, "batch": 2},
        "row_length": 48,
        "eval_prompts": 0,
        "log_every": 1,
        "dtype": "float32",
        "tensorboard": False,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def stopped(folder: Path) -> tuple[Path, int, str]:
    """Output, exit code and messages of a run that received SIGTERM after some steps."""
    output = folder / "stopped"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "train.py", "--config", str(folder / "run.yaml"), "--output", str(output)],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        metrics, waited = output / "metrics.csv", time.monotonic() + 240
        while process.poll() is None and time.monotonic() < waited:
            if metrics.exists() and metrics.read_text().count("\n") > 3:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.05)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    return output, process.returncode, messages


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_success(stopped):
    output, code, messages = stopped
    assert code == 0, messages
    (checkpoint,) = (output / "checkpoints").iterdir()
    step = int(checkpoint.name)
    assert f"stopped by SIGTERM after step {step}, which is saved" in messages
    assert (output / "metrics.csv").read_text().splitlines()[-1].startswith(f"{step},")
    assert not (output / "draft").exists(), "a draft is exported when training is done"


@pytest.mark.slow
def test_the_newest_checkpoint_is_exported_without_training(stopped, folder, tmp_path):
    output, *_ = stopped
    common = ("--config", str(folder / "run.yaml"), "--output", str(output))
    before = sorted(path for path in output.rglob("*") if path.is_file())
    assert call(*common, "--export", str(tmp_path / "draft")) == 0
    assert sorted(path for path in output.rglob("*") if path.is_file()) == before
    target, _ = load_target(folder / "target", "float32")
    drafter, _ = load_drafter(tmp_path / "draft", target, "float32")
    assert drafter.config.block_size == 4
    store = TensorStore(tmp_path / "draft")
    assert {str(store[name].dtype) for name in store} == {"bfloat16"}


def test_nothing_to_export(folder, tmp_path, capsys):
    common = ("--config", str(folder / "run.yaml"), "--output", str(tmp_path))
    assert call(*common, "--export", str(tmp_path / "draft")) == 2
    assert "error: no checkpoint in " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    program = """
import sys, time
from mmflash_jax.training.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while stop.signal is None: time.sleep(0.01)
    print(stop.signal.name, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        for word in ("ready", "SIGINT"):
            if word != "ready":
                process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == word + "\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.stdout.close()


def test_fresh_forgets_steps_and_keeps_answers(folder, tmp_path, capsys):
    common = ("--config", str(folder / "run.yaml"), "--output", str(tmp_path / "run"))
    assert call(*common, "--optimiser.steps", "2") == 0
    answers = tmp_path / "run" / "answers.jsonl"
    made = answers.stat().st_mtime_ns
    assert call(*common, "--optimiser.steps", "3") == 2
    assert "optimiser.steps is 2 there and 3 in the config" in capsys.readouterr().err
    assert call(*common, "--optimiser.steps=3", "--fresh") == 0
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2", "3"]
    assert answers.stat().st_mtime_ns == made
    again = tmp_path / "again"
    assert call(*common, "--export", str(again)) == 0
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (tmp_path / "run" / "draft" / name).read_bytes()


def test_prompts_that_cannot_be_encoded_are_named_together(folder, tmp_path, capsys):
    """Training and held-out prompts, before the target answers anything."""
    Image.new("RGB", (64, 64)).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    for names, bad in (
        (["good", "absent", "good", "broken", "good"], {2: "absent", 4: "broken"}),
        (["good", "good", "good", "good", "absent"], {5: "absent"}),
    ):
        prompts = tmp_path / "prompts.jsonl"
        rows = [{"text": "What?", "images": [f"{name}.png"]} for name in names]
        prompts.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
        output = tmp_path / "run"
        assert call(
            "--config", str(folder / "run.yaml"), "--output", str(output),
            "--data.path", str(prompts), "--data.held_out", "1", "--eval_prompts", "1",
        ) == 2  # fmt: skip
        error = [line for line in capsys.readouterr().err.splitlines() if ".png" in line]
        assert len(error) == len(bad)
        for line, (number, name) in zip(error, bad.items(), strict=True):
            # Every other line is blank.
            assert f"{prompts}:{2 * number - 1}: " in line
            assert name in line
        assert not (output / "answers.jsonl").exists()


WRONG = {
    "unknown": (["--optimiser.step", "3"], "unknown fields ['optimiser.step']; known are"),
    "type": (["--optimiser.steps", "many"], "optimiser.steps is 'many', expected int"),
    "value": (["--optimiser.batch=0"], "optimiser.batch is 0, it must be positive"),
    "no value": (["--optimiser.steps"], "--optimiser.steps has no value"),
    "no flag": (["steps", "3"], "unexpected argument 'steps'"),
    "no mapping": (["--target.name", "3"], "--target.name: target is "),
    "no YAML": (["--target", "[3"], "--target is '[3', which is not valid YAML"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_flag_is_refused_as_in_the_file(folder, capsys, flags, message):
    assert call("--config", str(folder / "run.yaml"), *flags) == 2
    assert message in capsys.readouterr().err


def test_help_lists_every_setting_with_its_value(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        call("--config", str(folder / "run.yaml"), "--optimiser.steps", "77", "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("--optimiser.steps", "77", "--mesh.fsdp", "--data.held-out"):
        assert part in text
    with pytest.raises(SystemExit):
        call("--help")
    assert "--export" in capsys.readouterr().out
