"""The training loop: steps, metrics, checkpoints, and what ends a run before its last step."""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from tqdm import tqdm

from mmflash_jax.config_train import TrainConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.layers.schema import Params
from mmflash_jax.sharding import make_training_mesh, place, replicated, split_largest_axis
from mmflash_jax.training.checkpoint import Checkpoints
from mmflash_jax.training.data import Row
from mmflash_jax.training.feed import batches, to_devices
from mmflash_jax.training.metrics import MetricsWriter
from mmflash_jax.training.objective import Trained
from mmflash_jax.training.processes import largest_anywhere
from mmflash_jax.training.signals import StopRequest
from mmflash_jax.training.step import (
    METRICS,
    Recipe,
    TrainState,
    make_optimiser,
    make_state,
    train_step,
)
from mmflash_jax.training.stored_features import store_features

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818 - it is asked for, no error
    """A signal ended the run after `step`, which is saved."""

    def __init__(self, step: int, number: int):
        self.step, self.signal = step, signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name} after step {step}, which is saved")


@dataclass
class Progress:
    """What is known of a run besides its state: metrics of the last logged step and of the best.

    The best step is the one whose drafts were kept longest.
    """

    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)

    def add(self, values: dict[str, float]) -> None:
        self.last = values
        if not self.best or values["kept"] > self.best["kept"]:
            self.best = values


def fit(
    plan: Plan,
    target_params: Params,
    rows: Sequence[Row],
    config: TrainConfig,
    checkpoints: Checkpoints,
    evaluate: Callable[[int, Params], object] | None = None,
) -> Params:
    """Train a draft on `rows` from its newest checkpoint, or afresh; returns float32 parameters.

    `evaluate` receives step and parameters every `eval_every` steps but the last; every process
    calls it. It must not change them.

    Raises:
        ConfigError: too few rows or devices, or features on disk that are not those of this run.
        FloatingPointError: loss or gradients are no longer finite. Nothing of it was saved.
        Stopped: a signal asked for it.
    """
    settings = config.optimiser
    assert isinstance(plan.drafter, Trained)
    wide = dataclasses.replace(plan.drafter, dtype="float32")
    mesh = make_training_mesh(config.mesh.data, config.mesh.fsdp)
    recipe = Recipe(plan, make_optimiser(settings), config.objective, settings.accumulate, mesh)
    params = wide.init_params(settings.seed)
    if mesh is not None:
        params = place(params, lambda x: split_largest_axis(x.shape, mesh, "fsdp"))
        target_params = place(target_params, lambda _: replicated(mesh))
    stored = None
    if config.features == "disk":
        stored = store_features(plan, target_params, rows, config, mesh)
    source = batches(
        rows, settings.batch * settings.accumulate, config.row_length, settings.seed, stored, mesh
    )
    state = make_state(recipe, params)
    progress = Progress()
    if checkpoints.record is not None:
        state = checkpoints.restore(state)
        source.set_state(checkpoints.record["feed"])
        progress = Progress(**checkpoints.record["metrics"])
        log.info("going on after step %d of %s", int(state.step), checkpoints.folder)
    done = int(state.step)
    writes = jax.process_index() == 0

    def save(state: TrainState) -> None:
        checkpoints.save(state, source.get_state(), wide.config.to_hf(), vars(progress))

    columns = [*METRICS, *_by_slot(range(plan.drafter.block - 1))]
    with StopRequest() as stop, _metrics_writer(config, columns, done, writes=writes) as writer:
        steps = range(done + 1, settings.steps + 1)
        for number in tqdm(
            steps, desc="train", unit="step", initial=done, total=settings.steps,
            disable=not writes,
        ):  # fmt: skip
            batch = to_devices(next(source), mesh)
            state, metrics = train_step(recipe, target_params, state, batch, settings.seed)
            last = number == settings.steps
            logs = number % config.log_every == 0 or last
            # Processes hear of a signal at different times and must stop at the same step.
            stopped = largest_anywhere(stop.signal or 0)
            saves = number % config.save_every == 0 or last or stopped
            if logs or saves:
                _check_finite(state, checkpoints)
            if logs:
                values = {name: float(metrics[name]) for name in METRICS}
                progress.add({"step": number, **values})
                if writer is not None:
                    writer.write(number, values | _by_slot(metrics["accuracy_per_position"]))
                log.info("step %d %s", number, {k: round(v, 4) for k, v in values.items()})
            if saves:
                save(state)
            if evaluate and config.eval_every and number % config.eval_every == 0 and not last:
                evaluate(number, state.params)
            if stopped:
                raise Stopped(number, stopped)
    return state.params


def _by_slot(accuracy: Iterable[Any]) -> dict[str, float]:
    """Share of right slots 1 .. block - 1, by column name."""
    return {f"accuracy_{slot}": float(share) for slot, share in enumerate(accuracy, 1)}


def _metrics_writer(
    config: TrainConfig, names: Sequence[str], step: int, *, writes: bool
) -> contextlib.AbstractContextManager[MetricsWriter | None]:
    if not writes:
        return contextlib.nullcontext()
    return MetricsWriter(config.output, names, step=step, tensorboard=config.tensorboard)


def _check_finite(state: TrainState, checkpoints: Checkpoints) -> None:
    """Refuse to log or to save a state that a bad step has reached.

    Raises:
        FloatingPointError: it names the step at which it began and what is left.
    """
    bad = int(state.bad_step)
    if not bad:
        return
    saved = checkpoints.record
    left = f"step {saved['step']} is saved in {checkpoints.folder}" if saved else "nothing is saved"
    raise FloatingPointError(f"loss or gradient is not finite at step {bad}; {left}")
