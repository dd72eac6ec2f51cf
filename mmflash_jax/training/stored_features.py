"""What a frozen target says about training rows, made once and kept beside the run.

One safetensors file a row holds its tokens' features, in the compute dtype and without padding.
`features.jsonl` says under which settings they were made and which rows are done, so that a killed
run goes on and other settings are refused.
"""

import contextlib
import functools
import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from mmflash_jax.config_train import TrainConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.engine.journal import Journal
from mmflash_jax.layers.schema import Params
from mmflash_jax.training.data import Batch, Row, collate
from mmflash_jax.training.feed import split_rows, to_devices
from mmflash_jax.training.processes import wait_for_all
from mmflash_jax.training.provenance import target_identity
from mmflash_jax.training.step import target_states
from mmflash_jax.weights.hf_config import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredFeatures:
    """Files of rows in `folder`.

    widths: numbers of a token by name: `features` of the captured layers and, for the kl loss,
        `hidden` after the final norm.
    """

    folder: Path
    widths: dict[str, int]
    dtype: np.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes on disk."""
        return sum(self.widths.values()) * self.dtype.itemsize

    def path(self, row: int) -> Path:
        return self.folder / f"{row:08d}.safetensors"

    def batch(self, rows: Sequence[int], width: int, places: Iterable[int]) -> Batch:
        """Arrays `[B, width, ...]` of some rows. Only those at `places` are read, others are zero.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        made = {
            name: np.zeros((len(rows), width, size), self.dtype)
            for name, size in self.widths.items()
        }
        for place in places:
            for name, values in self._read(int(rows[place])).items():
                made[name][place, : len(values)] = values
        return made

    def _read(self, row: int) -> dict[str, np.ndarray]:
        path = self.path(row)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} is missing or damaged ({error}); remove {self.folder}.jsonl to make the "
                "features anew"
            ) from None


def store_features(
    plan: Plan, target_params: Params, rows: Sequence[Row], config: TrainConfig, mesh: Mesh | None
) -> StoredFeatures:
    """Features of all rows, read from `output/features` or made by one pass of the target.

    They are made in batches as large as those that training computes, spread over the devices in
    the same way; each process writes what its own devices made. All processes must call this.

    Raises:
        ConfigError: the folder holds features of other settings or rows, or the disk is too small.
    """
    widths = {"features": len(plan.drafter.capture) * plan.target.config.hidden_size}
    if config.objective.loss == "kl":
        widths["hidden"] = plan.target.config.hidden_size
    stored = StoredFeatures(config.output / "features", widths, jnp.dtype(plan.target.dtype))
    journal = Journal(
        config.output / "features.jsonl", _header(plan, rows, widths, config), "make them anew"
    )
    known = journal.read()
    batch = config.optimiser.batch
    # Whole batches only: the shape of a batch may change the last bits.
    done = len(known) if len(known) == len(rows) else len(known) - len(known) % batch
    _check_space(stored, rows[done:])
    # Nobody writes before everybody knows what is there.
    wait_for_all()
    if done == len(rows):
        log.info("features of %d rows read from %s", done, stored.folder)
        return stored
    stored.folder.mkdir(exist_ok=True)
    others = jax.process_index() > 0
    with (
        contextlib.nullcontext() if others else journal.append(done) as write,
        tqdm(total=len(rows), initial=done, desc="features", unit="row",
             disable=others) as bar,
    ):  # fmt: skip
        for start in range(done, len(rows), batch):
            part = rows[start : start + batch]
            # The last batch is filled up, so that one program serves all.
            filled = [*part, *[part[-1]] * (batch - len(part))]
            made = _states(
                plan, target_params, to_devices(collate(filled, config.row_length), mesh),
                tuple(widths), mesh,
            )  # fmt: skip
            for place, arrays in _rows_here(made):
                if place < len(part):
                    length = len(part[place].ids)
                    save_file(
                        {name: np.ascontiguousarray(x[:length]) for name, x in arrays.items()},
                        stored.path(start + place),
                    )
            wait_for_all()
            if write is not None:
                write(len(row.ids) for row in part)
            bar.update(len(part))
    wait_for_all()
    return stored


@functools.partial(jax.jit, static_argnames=("plan", "names", "mesh"))
def _states(
    plan: Plan,
    target_params: Params,
    batch: dict[str, Any],
    names: tuple[str, ...],
    mesh: Mesh | None,
) -> dict[str, Array]:
    features, hidden = target_states(plan, target_params, batch)
    made = {name: {"features": features, "hidden": hidden}[name] for name in names}
    if mesh is None:
        return made
    return jax.lax.with_sharding_constraint(made, split_rows(mesh))


def _rows_here(arrays: dict[str, Array]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Place in the batch and arrays of each row that this process's devices hold."""
    shards = {name: array.addressable_shards for name, array in arrays.items()}
    for parts in zip(*shards.values(), strict=True):
        first = parts[0].index[0].start or 0
        host = [np.asarray(part.data) for part in parts]
        for place, values in enumerate(zip(*host, strict=True), start=first):
            yield place, dict(zip(shards, values, strict=True))


def _header(
    plan: Plan, rows: Sequence[Row], widths: dict[str, int], config: TrainConfig
) -> dict[str, Any]:
    made = hashlib.sha256()
    for row in rows:
        made.update(row.ids.tobytes())
        made.update(row.positions.tobytes())
    return {
        **target_identity(config.target, plan.target.dtype),
        "target_layer_ids": list(plan.drafter.capture),
        "arrays": widths,
        "row_length": config.row_length,
        "number of rows": len(rows),
        # Prompts and answers as they went in.
        "rows": made.hexdigest(),
    }


def _check_space(stored: StoredFeatures, rows: Sequence[Row]) -> None:
    """Say what the rows will take on disk, and refuse if that is more than there is."""
    if not rows:
        return
    tokens = sum(len(row.ids) for row in rows)
    needed, free = tokens * stored.token_bytes, shutil.disk_usage(stored.folder.parent).free
    figures = (
        f"{len(rows)} rows, {tokens} tokens x {stored.token_bytes} bytes = {needed / 1e9:.3g} GB "
        f"in {stored.folder}, {free / 1e9:.3g} GB are free"
    )
    log.info("features on disk: %s", figures)
    if needed > free:
        raise ConfigError(
            f"features: disk does not fit: {figures}; take fewer prompts, a smaller row_length, "
            "another output or features: online"
        )
