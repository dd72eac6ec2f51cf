"""Features kept on disk: the same losses as online, files that go on and files that are refused."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.training import loop, stored_features
from mmflash_jax.training.feed import batches
from mmflash_jax.training.loop import Stopped
from mmflash_jax.training.stored_features import StoredFeatures
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafts import two_layer_target
from tests.training.runs import WIDTH, Runs, lines
from tests.training.test_loop import stop_at

DISK: dict[str, Any] = {"features": "disk"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(two_layer_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def finished(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps; 20 rows in batches of 8, the last one not full."""
    output = tmp_path_factory.mktemp("finished")
    runs.fit(runs.config(output, **DISK, optimiser={"steps": 2}))
    return output


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """Its features without its checkpoint."""
    output = tmp_path / "copied"
    shutil.copytree(finished, output, ignore=shutil.ignore_patterns("checkpoints"))
    return output


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every pass of the target over a batch of rows."""
    made: list[int] = []
    run = stored_features._states

    def counted(*given: Any) -> Any:
        made.append(1)
        return run(*given)

    monkeypatch.setattr(stored_features, "_states", counted)
    return made


SETTINGS = {
    "ce": {},
    "kl, in two parts": {"objective": {"loss": "kl"}, "optimiser": {"batch": 4, "accumulate": 2}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_run_from_disk_learns_as_one_online(runs, tmp_path, settings):
    runs.fit(runs.config(tmp_path / "online", **settings))
    runs.fit(runs.config(tmp_path / "disk", **DISK, **settings))
    online, disk = (lines(tmp_path / name) for name in ("online", "disk"))
    assert len(disk) == 8
    for name in ("loss", "grad_norm", "kept"):
        np.testing.assert_allclose(
            [float(line[name]) for line in disk], [float(line[name]) for line in online], rtol=1e-6
        )
    assert not (tmp_path / "online" / "features").exists()


def test_the_step_takes_what_is_stored(runs, copied):
    """No pass of the target in the step: other numbers in the files give other losses."""
    before = lines(copied)
    for file in (copied / "features").iterdir():
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.seek(size // 2)
            stream.write(bytes(size - size // 2))
    runs.fit(runs.config(copied, **DISK, optimiser={"steps": 2}))
    assert lines(copied)[0]["loss"] != before[0]["loss"]


def test_a_stopped_run_goes_on_from_disk_or_online(runs, finished, copied, passes):
    """Where features come from may change between two starts of a run."""
    config = runs.config(copied, **DISK)
    made = iter(range(1, 100))
    with pytest.MonkeyPatch.context() as patch:
        call = stop_at(3)
        patch.setattr(loop, "to_devices", lambda batch, mesh: call(next(made), batch))
        with pytest.raises(Stopped):
            runs.fit(config)
    online = copied.with_name("online")
    shutil.copytree(copied, online)
    runs.fit(config)
    runs.fit(runs.config(online))
    assert not passes, "all rows were stored"
    assert [line["step"] for line in lines(copied)] == [str(n) for n in range(1, 9)]
    np.testing.assert_allclose(
        *([float(line["loss"]) for line in lines(output)] for output in (copied, online)),
        rtol=1e-6,
    )


@pytest.mark.parametrize("kept", [0, 7, 9, 19])
def test_a_killed_pass_goes_on_at_its_batch(runs, finished, copied, passes, kept):
    journal = copied / "features.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(b"\n".join(whole.split(b"\n")[: kept + 1]) + b"\n[")
    for row in range(kept, 20):
        (copied / "features" / f"{row:08d}.safetensors").write_bytes(b"half")
    runs.fit(runs.config(copied, **DISK, optimiser={"steps": 2}))
    assert len(passes) == 3 - kept // 8
    assert journal.read_bytes() == whole
    for file in sorted((finished / "features").iterdir()):
        assert (copied / "features" / file.name).read_bytes() == file.read_bytes()


def test_what_a_file_holds(runs, finished):
    stored = StoredFeatures(finished / "features", {"features": 2 * 64}, np.dtype(np.float32))
    assert len(list(stored.folder.iterdir())) == 20
    made = stored.batch([3, 2, 5], WIDTH, [0, 2])["features"]
    assert made.shape == (3, WIDTH, 2 * 64)
    for place, row in ((0, 3), (2, 5)):
        length = len(runs.rows[row].ids)
        assert np.abs(made[place, :length]).min(axis=-1).max() > 0
        assert not made[place, length:].any()
    assert not made[1].any(), "a row of another process was read"
    assert stored.token_bytes == 512


def test_bfloat16_comes_back(tmp_path):
    stored = StoredFeatures(tmp_path, {"features": 4}, jnp.dtype("bfloat16"))
    values = np.arange(12).reshape(3, 4).astype(stored.dtype)
    stored_features.save_file({"features": values}, stored.path(0))
    made = stored.batch([0], 5, [0])["features"]
    assert made.dtype == stored.dtype
    np.testing.assert_array_equal(made[0, :3], values)
    assert stored.token_bytes == 8


CHANGES = {
    "loss": ({"objective": {"loss": "kl"}}, "arrays is {'features': 128} there and {'features': 1"),
    "row_length": ({"row_length": 40}, "row_length is 32 there and 40 in the config"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_features_of_other_settings_are_refused(runs, copied, change, message):
    before = (copied / "features.jsonl").read_bytes()
    with pytest.raises(ConfigError) as error:
        runs.fit(runs.config(copied, **DISK, **change))
    assert message in str(error.value)
    assert "features.jsonl was made with other settings" in str(error.value)
    assert "remove the file to make them anew" in str(error.value)
    assert (copied / "features.jsonl").read_bytes() == before


def test_features_of_other_rows_are_refused(runs, copied, monkeypatch):
    other = list(runs.rows)
    other[4] = other[5]
    monkeypatch.setattr(runs, "rows", other)
    with pytest.raises(ConfigError, match="rows is '"):
        runs.fit(runs.config(copied, **DISK))
    monkeypatch.setattr(runs, "rows", other[:-1])
    with pytest.raises(ConfigError, match="number of rows is 20 there and 19 in"):
        runs.fit(runs.config(copied, **DISK))


def test_features_of_another_target_are_refused(runs, copied):
    journal = copied / "features.jsonl"
    header, rest = journal.read_text().split("\n", 1)
    assert json.loads(header)["target_layer_ids"] == [0, 1]
    for name in ("target_revision", "dtype", "target_layer_ids"):
        journal.write_text(json.dumps({**json.loads(header), name: "x"}) + "\n" + rest)
        with pytest.raises(ConfigError, match=f"{name} is 'x' there"):
            runs.fit(runs.config(copied, **DISK))


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_lost_or_damaged_file_is_named(runs, copied, content):
    for file in (copied / "features").iterdir():
        file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"safetensors is missing or damaged .*remove .*jsonl"):
        runs.fit(runs.config(copied, **DISK))


def test_a_full_disk_is_noticed_before_the_pass(runs, tmp_path, monkeypatch, caplog, passes):
    usage = namedtuple("usage", "total used free")
    tokens = sum(len(row.ids) for row in runs.rows)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, tokens * 512 - 1))
    with pytest.raises(ConfigError, match=f"20 rows, {tokens} tokens x 512 bytes = .* GB are free"):
        runs.fit(runs.config(tmp_path, **DISK))
    assert not passes
    assert not (tmp_path / "features").exists()


def test_rows_are_read_for_the_batch_that_holds_them(runs):
    """The store is asked for the rows that were drawn, in their order."""

    class Numbers:
        def batch(self, rows: Any, width: int, places: Any) -> dict[str, np.ndarray]:
            assert list(places) == [0, 1, 2]
            return {"number": np.array(rows)}

    source = batches(runs.rows, 3, WIDTH, 0, Numbers())
    for _ in range(8):
        batch = next(source)
        for place, number in enumerate(batch["number"]):
            ids = runs.rows[number].ids
            assert batch["ids"][place, : len(ids)].tolist() == ids.tolist()
