"""Checkpoints of a run: all that a later start needs to go on as if nothing had happened.

The one module that knows orbax. A checkpoint holds the draft's parameters, the optimiser's state
and a JSON record: settings, step, place in the data, metrics, the draft's configuration. It is
written to a temporary folder and renamed, so a folder with a step's name is whole.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mmflash_jax.config_files import as_values
from mmflash_jax.config_train import TrainConfig
from mmflash_jax.training.step import TrainState
from mmflash_jax.weights.hf_config import ConfigError

# Orbax reports every step of its work as information.
logging.getLogger("absl").setLevel(logging.WARNING)

# What may differ in a run that goes on: where and how often it writes, the devices and kernels it
# runs on (the same computation, rounded differently), where features come from, and what happens
# after the last step.
MAY_CHANGE = (
    "output", "log_every", "save_every", "keep", "tensorboard", "mesh", "kernels", "features",
    "eval_prompts", "eval_every",
)  # fmt: skip


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` stay.

    Raises:
        ConfigError: the newest one was made with other settings, or cannot be read.
    """

    def __init__(self, config: TrainConfig, dtype: str):
        """`dtype` is the compute dtype that `auto` stands for here."""
        self._settings = as_values(config) | {"dtype": dtype}
        self.folder = config.output.absolute() / "checkpoints"
        self._manager = _manager(self.folder, config.keep)
        self.record = _record(self._manager)
        if self.record is not None:
            _check(self.folder, self.record, self._settings)

    def save(
        self, state: TrainState, feed: Any, draft: dict[str, Any], metrics: dict[str, Any]
    ) -> None:
        """Write the state after `state.step` steps; returns when it is on disk.

        feed: the state of the data iterator. draft: the draft's `config.json`.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        record = {
            "settings": self._settings,
            "step": step,
            "feed": feed,
            "draft": draft,
            "metrics": metrics,
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),  # pyright: ignore[reportCallIssue]
                state=ocp.args.StandardSave(_rest(state)),  # pyright: ignore[reportCallIssue]
                record=ocp.args.JsonSave(record),  # pyright: ignore[reportCallIssue]
            ),
        )
        self.record = record

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, every array placed as in `like`."""
        assert self.record is not None
        step = self.record["step"]
        made = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=_restore(like.params),
                state=_restore(_rest(like)),
            ),
        )
        return TrainState(params=made["params"], **made["state"])

    def close(self) -> None:
        self._manager.close()


def read_checkpoint(folder: Path, step: int | None = None) -> tuple[dict[str, Any], Any]:
    """A record under `folder` and a function from like arrays to the draft's parameters.

    The record is the newest one, or that of `step`.

    Raises:
        ConfigError: there is no checkpoint, or none of that step.
    """
    manager = _manager(folder.absolute(), None) if folder.is_dir() else None
    if manager is not None and step is not None and step not in manager.all_steps():
        raise ConfigError(f"step is {step}, {folder} holds {sorted(manager.all_steps())}")
    record = _record(manager, step) if manager else None
    if manager is None or record is None:
        raise ConfigError(f"no checkpoint in {folder}")

    def params(like: Any) -> Any:
        return manager.restore(record["step"], args=ocp.args.Composite(params=_restore(like)))[
            "params"
        ]

    return record, params


def _manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        # A save that has returned is on disk. Saves are rare, and the next step would reuse the
        # memory that is being written.
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager(folder, options=options)


def _record(manager: ocp.CheckpointManager, step: int | None = None) -> dict[str, Any] | None:
    step = manager.latest_step() if step is None else step
    if step is None:
        return None
    try:
        return manager.restore(
            step,
            args=ocp.args.Composite(record=ocp.args.JsonRestore()),  # pyright: ignore[reportCallIssue]
        )["record"]
    except (KeyError, ValueError, OSError) as error:
        raise ConfigError(f"{manager.directory}/{step} is no checkpoint of ours: {error}") from None


def _check(folder: Path, record: dict[str, Any], settings: dict[str, Any]) -> None:
    there, here = _flat(record["settings"]), _flat(settings)
    different = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} in the config"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name) and name.split(".")[0] not in MAY_CHANGE
    ]
    if different:
        raise ConfigError(
            f"{folder}/{record['step']} was made with other settings: {'; '.join(different)}. "
            "Set them back to go on, or start anew with --fresh or another output"
        )


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    return {
        name: value
        for key, inner in values.items()
        for name, value in _flat(inner, f"{prefix}{key}.").items()
    }


def _rest(state: TrainState) -> dict[str, Any]:
    return {"optimiser": state.optimiser, "step": state.step, "bad_step": state.bad_step}


def _restore(like: Any) -> Any:
    """Arguments that bring a tree back in the shapes, dtypes and shardings of `like`."""
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    return ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
