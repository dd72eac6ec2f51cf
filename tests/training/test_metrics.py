"""The CSV file of a run, and TensorBoard files where they can be written."""

import sys
import types
from pathlib import Path

import pytest

from mmflash_jax.training.metrics import MetricsWriter
from mmflash_jax.weights.hf_config import ConfigError

NAMES = ("loss", "kept")


def write(folder: Path, first: int, last: int, step: int = 0) -> None:
    with MetricsWriter(folder, NAMES, step=step, tensorboard=False) as writer:
        for number in range(first, last + 1):
            writer.write(number, {"kept": number / 2, "loss": 1 / number})


def test_steps_that_are_made_again_replace_the_old_ones(tmp_path):
    write(tmp_path, 1, 6)
    write(tmp_path, 5, 7, step=4)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == "step,loss,kept,seconds"
    assert [int(row.split(",")[0]) for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    seconds = [float(row.split(",")[-1]) for row in rows]
    assert seconds == sorted(seconds)


def test_a_run_from_the_start_begins_the_file_anew(tmp_path):
    write(tmp_path, 1, 6)
    write(tmp_path, 1, 1)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2


def test_a_file_of_other_columns_is_left_alone(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(ConfigError, match=r"has the columns \['step', 'loss'\], this run writes"):
        write(tmp_path, 2, 2, step=1)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,2\n"


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mmflash-jax\[tensorboard\]'"):
        MetricsWriter(tmp_path, NAMES, step=0, tensorboard=True)
    with MetricsWriter(tmp_path, NAMES, step=0) as writer:
        writer.write(1, {"loss": 1.0, "kept": 2.0})
    assert not (tmp_path / "tensorboard").exists()


def test_what_tensorboard_receives(tmp_path, monkeypatch):
    """A stand-in for its writer; `purge_step` hides events of steps that are made again."""
    made: list[object] = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            made.append((Path(folder).name, purge_step))

        def add_scalar(self, name, value, step):
            made.append((name, value, step))

        def close(self):
            made.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with MetricsWriter(tmp_path, NAMES, step=4, tensorboard=True) as writer:
        writer.write(5, {"loss": 1.0, "kept": 2.0})
    assert made == [("tensorboard", 5), ("train/loss", 1.0, 5), ("train/kept", 2.0, 5), "closed"]


def test_the_real_tensorboard_writer(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsWriter(tmp_path, NAMES, step=0) as writer:
        writer.write(1, {"loss": 1.0, "kept": 2.0})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
