"""A batch run that is killed goes on where it was: every row once, none done again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmflash_jax.config import ServeConfig
from mmflash_jax.evaluation.batch import run
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafts import two_layer_target

ROOT = Path(__file__).parent.parent.parent
COUNT = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    two_layer_target(folder / "target")
    lines = [{"id": f"row{n}", "text": f"Number {n}?", "max_tokens": 12} for n in range(COUNT)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def config(folder: Path, output: str, **changes) -> ServeConfig:
    return ServeConfig(
        target=str(folder / "target"),
        draft="none",
        plain=False,
        batch=1,
        prompts=folder / "in.jsonl",
        output=folder / output,
        **changes,
    )


def test_kill_and_go_on(folder, caplog):
    assert run(config(folder, "whole.jsonl")) == 0
    part = folder / "killed.jsonl.part"
    flags = [
        "--target", folder / "target", "--draft", "none", "--no-plain", "--batch", "1",
        "--prompts", folder / "in.jsonl", "--output", folder / "killed.jsonl",
    ]  # fmt: skip
    started = subprocess.Popen(
        [sys.executable, ROOT / "serve.py", *map(str, flags)],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (part.exists() and part.read_bytes().count(b"\n") > 4):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    done = part.read_bytes().count(b"\n") - 1
    assert 0 < done < COUNT
    assert not (folder / "killed.jsonl").exists()
    # What a kill in the middle of a line leaves.
    with part.open("ab") as stream:
        stream.write(b'{"token_ids": [1, 2')
    assert run(config(folder, "killed.jsonl")) == 0
    assert f"{done} of {COUNT} answers are in {part} already" in caplog.text
    assert (folder / "killed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    rows = [json.loads(line) for line in (folder / "killed.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"row{n}" for n in range(COUNT)]
    assert not part.exists()


def test_other_settings_are_refused_and_nothing_is_lost(folder):
    made = config(folder, "other.jsonl")
    part = folder / "other.jsonl.part"
    part.write_text(json.dumps({"target": "another"}) + "\n")
    with pytest.raises(ConfigError, match=r"other.jsonl.part was made with other settings: target"):
        run(made)
    assert part.read_text() == json.dumps({"target": "another"}) + "\n"
