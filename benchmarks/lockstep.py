"""Training runs that differ in token weights alone, side by side in one program.

The variants of a seed are `jax.vmap` of the trainer's own `train_step` over their states and token
weights. They see the same batches, anchors and initial draft, and the target's features are made
once for all of them. Nothing else differs from `train.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.prepared import Loaded, Prepared
from mmflash_jax.config_train import TrainConfig, VisualConfig
from mmflash_jax.evaluation.visual import share_of_top
from mmflash_jax.load import default_dtype
from mmflash_jax.training.data import Batch, Row, collate
from mmflash_jax.training.objective import Trained
from mmflash_jax.training.step import (
    Recipe,
    TrainState,
    make_optimiser,
    make_state,
    train_step,
)

STEPS_AT_ONCE = 25


@dataclass(frozen=True)
class Lockstep:
    """All variants of a seed at once.

    data: every row, padded, on the device; `media` is `[N, M, D]`, each row's own.
    weight: fp32 `[V, N, S]`, of each variant. score: nats `[N, S]`, NaN where there is none.
    """

    recipe: Recipe
    config: TrainConfig
    target_params: Any
    data: dict[str, jax.Array]
    weight: jax.Array
    score: np.ndarray

    @classmethod
    def of(
        cls, prepared: Prepared, config: TrainConfig, variants: Sequence[VisualConfig]
    ) -> "Lockstep":
        """Raises ConfigError if `config` asks for other rows than those prepared."""
        prepared.check(config)
        there = Loaded.of(config.target, default_dtype())
        recipe = Recipe(
            there.drafted(config), make_optimiser(config.optimiser), config.objective,
            config.optimiser.accumulate,
        )  # fmt: skip
        batch = collate_apart(prepared.rows, config.row_length)
        image_id = there.plain.target.config.image_token_id
        weights = [prepared.weights(settings, image_id) for settings in variants]
        return cls(
            recipe, config, there.params, jax.device_put(batch), jnp.asarray(np.stack(weights)),
            prepared.blank_scores(),
        )  # fmt: skip

    def train(self, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Parameters of every variant, `[V, ...]`, and the metrics of the last step."""
        settings = self.config.optimiser
        drafter = self.recipe.plan.drafter
        assert isinstance(drafter, Trained)
        wide = dataclasses.replace(drafter, dtype="float32")
        state = make_state(self.recipe, wide.init_params(seed))
        count = self.weight.shape[0]
        states = jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), state)
        rows = settings.batch * settings.accumulate
        order = _order(self.data["ids"].shape[0], rows, seed)
        metrics: dict[str, Any] = {}
        for start in tqdm(range(0, settings.steps, STEPS_AT_ONCE), desc=f"train, seed {seed}"):
            chosen = [next(order) for _ in range(min(STEPS_AT_ONCE, settings.steps - start))]
            states, metrics = some_steps(
                self.recipe, self.target_params, states, self.data, self.weight,
                np.stack(chosen), seed,
            )  # fmt: skip
        bad = np.asarray(states.bad_step)
        if bad.any():
            raise FloatingPointError(f"loss or gradient is not finite: first bad steps {bad}")
        return states.params, {name: np.asarray(value) for name, value in metrics.items()}

    def share_of_top(self, index: int) -> float | None:
        """Share of variant `index`'s weight on the top bucket of training tokens."""
        return share_of_top(self.score, np.asarray(self.weight[index]))


def _order(count: int, batch: int, seed: int) -> Any:
    """Which rows each step takes: the order of `training.feed`."""
    order = grain.MapDataset.source(list(range(count))).seed(seed).shuffle().repeat()
    return iter(order.batch(batch).map(np.asarray).to_iter_dataset())


def collate_apart(rows: Sequence[Row], width: int) -> Batch:
    """All rows as one batch, but the image features of each row apart: `media` `[N, M, D]`."""
    batch = collate(rows, width)
    most = max(len(row.media) for row in rows)
    apart = np.zeros((len(rows), most, rows[0].media.shape[1]), rows[0].media.dtype)
    media_idx = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        apart[index, : len(row.media)] = row.media
        media_idx[index, : len(row.ids)] = row.media_idx
    positions = np.moveaxis(batch["positions"], 1, 0)
    return batch | {"media": apart, "media_idx": media_idx, "positions": positions}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def some_steps(
    recipe: Recipe,
    target_params: Any,
    states: TrainState,
    data: dict[str, jax.Array],
    weight: jax.Array,
    chosen: jax.Array,
    seed: jax.Array | int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`train_step` of every variant on the rows `chosen` `[steps, B]`; metrics of the last."""

    def one(states: TrainState, rows: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = {name: value[rows] for name, value in data.items() if name != "weight"}
        media = batch["media"]
        offset = jnp.arange(media.shape[0])[:, None] * media.shape[1]
        batch["media_idx"] = jnp.where(batch["media_idx"] < 0, -1, batch["media_idx"] + offset)
        batch["media"] = media.reshape(-1, media.shape[-1])
        batch["positions"] = jnp.moveaxis(batch["positions"], 1, 0)

        def of_variant(
            state: TrainState, weight: jax.Array
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            return train_step(recipe, target_params, state, {**batch, "weight": weight}, seed)

        return jax.vmap(of_variant)(states, weight[:, rows])

    states, metrics = jax.lax.scan(one, states, chosen)
    return states, jax.tree.map(lambda x: x[-1], metrics)
