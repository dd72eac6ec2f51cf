"""Runs that are stopped, poisoned, accumulated or spread over devices."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mmflash_jax.config_train import ObjectiveConfig, OptimiserConfig
from mmflash_jax.training import loop
from mmflash_jax.training.feed import batches
from mmflash_jax.training.loop import Stopped
from mmflash_jax.training.step import Recipe, make_optimiser, make_state, train_step
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafts import random_params, two_layer_target
from tests.training.runs import WIDTH, Runs, lines


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def runs(target_folder: Path) -> Runs:
    return Runs(target_folder)


@pytest.fixture
def after_batch(monkeypatch: pytest.MonkeyPatch):
    """Calls a function with the number of each batch and the batch, once that is made."""

    def install(call) -> None:
        made = 0

        def to_devices(batch, mesh):
            nonlocal made
            made += 1
            return call(made, {name: np.asarray(value) for name, value in batch.items()})

        monkeypatch.setattr(loop, "to_devices", to_devices)

    return install


def stop_at(step: int, number: signal.Signals = signal.SIGTERM):
    def call(made: int, batch: Any) -> Any:
        if made == step:
            os.kill(os.getpid(), number)
        return batch

    return call


def steps_in(output: Path) -> list[int]:
    return sorted(int(path.name) for path in (output / "checkpoints").iterdir())


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [1, 5])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(
    runs, tmp_path, after_batch, step, accumulate
):
    """D10: losses, gradient norms and parameters are those of the uninterrupted run, bit for bit.

    Batches of 8 out of 20 rows: the data is in the middle of an epoch.
    """
    optimiser = {"optimiser": {"batch": 8 // accumulate, "accumulate": accumulate}}
    straight = runs.fit(runs.config(tmp_path / "straight", **optimiser))
    config = runs.config(tmp_path / "stopped", **optimiser)
    with pytest.MonkeyPatch.context() as patch:
        call, made = stop_at(step), iter(range(1, 100))
        patch.setattr(loop, "to_devices", lambda batch, mesh: call(next(made), batch))
        with pytest.raises(Stopped, match=f"stopped by SIGTERM after step {step}, which is saved"):
            runs.fit(config)
    assert steps_in(config.output) == [step]
    again = runs.fit(config)
    assert_same(again, straight)
    assert lines(config.output) == lines(tmp_path / "straight")
    assert [int(line["step"]) for line in lines(config.output)] == list(range(1, 9))


def test_lines_of_steps_that_are_made_again_are_replaced(runs, tmp_path, after_batch):
    """A run that died without a word: metrics go on after its last checkpoint."""

    def die(made: int, batch: Any) -> Any:
        if made == 6:
            raise KeyboardInterrupt
        return batch

    config = runs.config(tmp_path, save_every=3)
    after_batch(die)
    with pytest.raises(KeyboardInterrupt):
        runs.fit(config)
    assert [int(line["step"]) for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    with (tmp_path / "metrics.csv").open("a") as stream:
        stream.write("6,0.1")
    after_batch(lambda made, batch: batch)
    runs.fit(config)
    assert [int(line["step"]) for line in lines(tmp_path)] == list(range(1, 9))


def test_the_last_checkpoints_are_kept(runs, tmp_path):
    runs.fit(runs.config(tmp_path, save_every=2, keep=3, optimiser={"steps": 7}))
    assert steps_in(tmp_path) == [4, 6, 7]


CHANGES = {
    "learning rate": ({"optimiser": {"learning_rate": 1e-4}},
                      "optimiser.learning_rate is 0.003 there and 0.0001 in the config"),
    "steps": ({"optimiser": {"steps": 9}}, "optimiser.steps is 2 there and 9 in the config"),
    "two": ({"row_length": 64, "objective": {"decay": 3.0}},
            "objective.decay is None there and 3.0 in the config; row_length is 32 there and 64"),
    "kind of data": ({"data": {"kind": "jsonl", "path": "p"}}, "data.kind is 'charts' there and"),
    "target": ({"target": "other"}, "there and 'other' in the config"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    runs.fit(runs.config(output, optimiser={"steps": 2}))
    return output


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_other_settings_are_refused_by_name(runs, finished, change, message):
    change = {**change, "optimiser": {"steps": 2, **change.get("optimiser", {})}}
    with pytest.raises(ConfigError) as error:
        runs.fit(runs.config(finished, **change))
    assert message in str(error.value)
    assert "checkpoints/2 was made with other settings" in str(error.value)
    assert steps_in(finished) == [2]


def test_what_only_concerns_writing_may_change(runs, finished, tmp_path):
    (tmp_path / "moved").symlink_to(finished)
    change = {"log_every": 7, "save_every": 3, "keep": 1, "eval_prompts": 1, "kernels": "auto"}
    runs.fit(runs.config(tmp_path / "moved", optimiser={"steps": 2}, **change))


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_poisoned_batch_ends_the_run_and_is_not_saved(runs, tmp_path, after_batch, log_every):
    """The step is named, although with rare metrics it is noticed only before the next save."""

    def poison(made: int, batch: Any) -> Any:
        if made == 5:
            batch["media"] = np.full_like(batch["media"], np.nan)
            batch["media_idx"] = np.zeros_like(batch["media_idx"])
        return batch

    after_batch(poison)
    config = runs.config(tmp_path, log_every=log_every, save_every=2)
    with pytest.raises(FloatingPointError, match=r"finite at step 5; step 4 is saved in .*check"):
        runs.fit(config)
    assert steps_in(tmp_path) == [2, 4]
    after_batch(lambda made, batch: batch)
    params = runs.fit(config)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_an_accumulated_step_is_the_step_of_the_whole_batch(runs):
    """Parts with unlike numbers of slots: the mean of their means would be something else."""
    batch = next(batches(runs.rows, 8, WIDTH, 0))
    batch["total_len"] = np.array([8, 32, 9, 32, 10, 32, 7, 30], np.int32)
    transform = make_optimiser(OptimiserConfig(steps=10, warmup=0.1, learning_rate=1e-2))
    results = []
    for count in (1, 4):
        recipe = Recipe(runs.plan, transform, ObjectiveConfig(anchors=6), accumulate=count)
        state = make_state(recipe, random_params(runs.plan.drafter))
        metrics: dict[str, Any] = {}
        for _ in range(2):
            state, metrics = train_step(recipe, runs.target_params, state, batch)
        results.append((state.params, metrics["loss"], metrics["grad_norm"]))
    # Adam divides a gradient by its own size: rounding of one near zero shows in the parameter.
    for other in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), results[0], other
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "features"), [(1, "online"), (2, "disk")])
def test_eight_devices_learn_as_one(runs, target_folder, tmp_path, processes, features):
    """Rows split over data 2 x fsdp 4, the draft and its optimiser over fsdp."""
    one, many = tmp_path / "one", tmp_path / "many"
    runs.fit(runs.config(one))
    devices = f"--xla_force_host_platform_device_count={8 // processes}"
    # Of a flag given twice the last counts.
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}"}
    if processes > 1:
        environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
        environment["JAX_NUM_PROCESSES"] = str(processes)
    command = [sys.executable, "-m", "tests.training.runs", str(target_folder), str(many)]
    command += ["2", "4", features]
    started = [
        subprocess.Popen(
            command,
            env={**environment, "JAX_PROCESS_ID": str(index)},
            cwd=Path(__file__).parents[2],
        )
        for index in range(processes)
    ]
    try:
        assert [process.wait(timeout=300) for process in started] == [0] * processes
    finally:
        for process in started:
            process.kill()
    losses = [[float(line["loss"]) for line in lines(output)] for output in (one, many)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    # A run may go on on other devices: the checkpoint of eight is read by one.
    runs.fit(runs.config(many))


def test_too_few_devices(runs, tmp_path):
    config = runs.config(tmp_path, mesh={"data": 2, "fsdp": 4})
    if len(jax.devices()) < 8:
        with pytest.raises(ValueError, match="mesh needs 8 devices, but there are"):
            runs.fit(config)
    with pytest.raises(ConfigError, match="batch is 8, it must be a multiple of the 3 devices"):
        runs.config(tmp_path, mesh={"data": 3})
