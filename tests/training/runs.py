"""Whole training runs over a tiny target, without prompts: made-up rows, one of them an image's.

As a program it writes the losses of one run over a mesh, for tests that need their own devices:
`python -m tests.training.runs TARGET_FOLDER OUTPUT DATA FSDP FEATURES`.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmflash_jax.config_files import build
from mmflash_jax.config_train import TrainConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import load_target
from mmflash_jax.sharding import make_training_mesh
from mmflash_jax.training.checkpoint import Checkpoints
from mmflash_jax.training.data import Row
from mmflash_jax.training.feed import places_here
from mmflash_jax.training.loop import fit
from mmflash_jax.training.processes import start_processes
from tests.drafts import draft_for

WIDTH = 32


class Runs:
    """Runs that differ in their settings only."""

    def __init__(self, target_folder: Path):
        self.folder = target_folder
        self.target, self.target_params = load_target(target_folder, "float32")
        drafter = draft_for(target_folder, block_size=4, num_hidden_layers=1)
        self.plan = Plan(self.target, drafter, ())
        self.rows = made_up_rows(self.target.config.hidden_size)

    def config(self, output: Path, **changes: Any) -> TrainConfig:
        """`changes` of nested fields are dicts that are merged with these."""
        values: dict[str, Any] = {
            "target": str(self.folder),
            "output": str(output),
            "draft": {
                "num_hidden_layers": 1, "intermediate_size": 96, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "mask_token": "x", "block_size": 4,
            },
            "data": {"kind": "charts"},
            "objective": {"anchors": 6},
            "optimiser": {"steps": 8, "batch": 8, "learning_rate": 3e-3, "warmup": 0.2},
            "row_length": WIDTH,
            "log_every": 1,
            "save_every": 100,
            "tensorboard": False,
        }  # fmt: skip
        for name, value in changes.items():
            old = values.get(name)
            values[name] = {**old, **value} if isinstance(old, dict) else value
        return build(TrainConfig, values, "")

    def fit(self, config: TrainConfig) -> Params:
        config.output.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(config, "float32")
        try:
            return fit(self.plan, self.target_params, self.rows, config, checkpoints)
        finally:
            checkpoints.close()


def made_up_rows(hidden_size: int, count: int = 20) -> list[Row]:
    """Rows of different lengths; the third holds three features of an image."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(random.integers(12, WIDTH + 1))
        media_idx = np.full(length, -1, np.int32)
        media = np.zeros((0, hidden_size), np.float32)
        if number == 2:
            media_idx[1:4] = [0, 1, 2]
            media = random.standard_normal((3, hidden_size), np.float32)
        places = np.arange(length, dtype=np.int32)
        ids = random.integers(0, 90, length).astype(np.int32)
        known = {
            "weight": np.ones(length, np.float32),
            "score": np.full(length, np.nan, np.float32),
        }
        rows.append(Row(ids, media_idx, np.stack([places] * 3), media, 5, **known))
    return rows


def lines(output: Path) -> list[dict[str, str]]:
    """Metrics of a run, without the time they took."""
    with (output / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def main() -> None:
    folder, output, data, fsdp, features = sys.argv[1:]
    start_processes()
    runs = Runs(Path(folder))
    mesh = {"data": int(data), "fsdp": int(fsdp)}
    params = runs.fit(runs.config(Path(output), mesh=mesh, features=features))
    # What is stored is read by the process whose devices need it.
    own = places_here(8, make_training_mesh(mesh["data"], mesh["fsdp"]))
    assert len(own) == 8 // jax.process_count()
    for leaf in jax.tree.leaves(params):
        assert len(leaf.addressable_shards) == jax.local_device_count()
        assert leaf.addressable_shards[0].data.size == leaf.size // int(fsdp)


if __name__ == "__main__":
    main()
