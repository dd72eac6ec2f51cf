"""One update of the draft, compiled: features of the target, loss, gradients, AdamW.

The target is frozen by construction: its parameters are a separate argument. Features come with
the batch or are made online, in the same compiled program as the draft's forward and backward pass.
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from mmflash_jax.config_train import ObjectiveConfig, OptimiserConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.decode.step import borrow_heads
from mmflash_jax.layers.schema import Params
from mmflash_jax.sharding import split_largest_axis
from mmflash_jax.training.blocks import sample_anchors
from mmflash_jax.training.objective import Trained, block_loss
from mmflash_jax.training.teacher import whole_rows

METRICS = ("loss", "accuracy", "kept", "grad_norm")
"""Of every step; `accuracy_per_position` `[block - 1]` comes with them."""


@dataclass(frozen=True)
class Recipe:
    """The static side of training: what is compiled, never traced.

    accumulate: parts that a batch is computed in, one after the other.
    """

    plan: Plan
    transform: optax.GradientTransformation
    objective: ObjectiveConfig
    accumulate: int = 1
    mesh: Mesh | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that changes from step to step, and so everything a checkpoint must hold.

    params: the draft's, float32.
    optimiser: moments and step counts of the optimiser.
    step: updates made so far. Random numbers of a step follow from the run's seed and this.
    bad_step: the first step whose loss or gradient was not finite, 0 if there was none. It stays
        on the device, so that the loop need not wait for every step to know.
    """

    params: Params
    optimiser: Any
    step: Array
    bad_step: Array


@functools.cache
def make_optimiser(settings: OptimiserConfig) -> optax.GradientTransformation:
    """AdamW with clipped gradients, linear warm-up and cosine decay to zero.

    Equal settings give the same object, so that runs of one process share what is compiled for it.
    """
    warm = max(1, round(settings.steps * settings.warmup))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warm, max(settings.steps, warm + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(rate, weight_decay=settings.weight_decay),
    )


def make_state(recipe: Recipe, params: Params) -> TrainState:
    """The state before the first step. Every leaf is a buffer of its own, for steps to reuse."""

    def fresh(params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        made = TrainState(
            params=params, optimiser=recipe.transform.init(params), step=zero, bad_step=zero
        )
        return _keep_split(made, recipe.mesh)

    return jax.jit(fresh)(params)


def _keep_split(state: TrainState, mesh: Mesh | None) -> TrainState:
    if mesh is None:
        return state
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, split_largest_axis(x.shape, mesh, "fsdp")),
        state,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def train_step(
    recipe: Recipe,
    target_params: Params,
    state: TrainState,
    batch: dict[str, Any],
    seed: Array | int = 0,
) -> tuple[TrainState, dict[str, Array]]:
    """One update, and its `METRICS`. Runs of another `seed` share the compiled program.

    The parts of an accumulated batch count as in one pass over all of it: gradients and losses
    are sums over slots, divided once by the weight of all slots. Accuracies and `kept` are means
    of the parts under the same weights.
    """
    number = state.step + 1
    objective = recipe.objective
    # Drawn for the whole batch: the same blocks, however many parts it has.
    anchors, valid = sample_anchors(
        jax.random.fold_in(jax.random.key(seed), number),
        batch["prompt_len"], batch["total_len"], objective.anchors, batch["ids"].shape[1],
        token_weight=batch.get("weight"),
    )  # fmt: skip
    per_row = {name: value for name, value in batch.items() if name not in ("media", "positions")}
    per_row |= {"anchors": anchors, "valid": valid}
    per_row["positions"] = jnp.moveaxis(batch["positions"], 1, 0)

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(METRICS[:-1], ())
    shapes["accuracy_per_position"] = (recipe.plan.drafter.block - 1,)

    def add(total: Any, part: dict[str, Array]) -> tuple[Any, None]:
        part = {**part, "media": batch["media"], "positions": jnp.moveaxis(part["positions"], 0, 1)}
        (loss, metrics), gradients = _loss_and_gradients(recipe, target_params, state.params, part)
        weight = metrics["weight_sum"]
        shown = {"loss": loss, **{name: metrics[name] for name in shapes if name != "loss"}}
        weighted = jax.tree.map(lambda x: x * weight, (gradients, shown))
        return jax.tree.map(jnp.add, total, (weighted, weight)), None

    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    start = ((jax.tree.map(jnp.zeros_like, state.params), zeros), jnp.zeros(()))
    (sums, weight), _ = jax.lax.scan(add, start, _parts(per_row, recipe.accumulate))
    gradients, metrics = jax.tree.map(lambda x: x / jnp.maximum(weight, 1e-6), sums)
    norm = optax.global_norm(gradients)
    updates, optimiser = recipe.transform.update(gradients, state.optimiser, state.params)
    bad = ~(jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm))
    state = TrainState(
        params=cast(Params, optax.apply_updates(state.params, updates)),
        optimiser=optimiser,
        step=number,
        bad_step=jnp.where((state.bad_step == 0) & bad, number, state.bad_step),
    )
    return _keep_split(state, recipe.mesh), {**metrics, "grad_norm": norm}


def _parts(per_row: dict[str, Array], count: int) -> dict[str, Array]:
    """Row arrays `[N, ...]` as `[count, N / count, ...]`.

    Part i takes rows i, i + count, ...: on a mesh every device has its share of every part.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), per_row)


def _loss_and_gradients(
    recipe: Recipe, target_params: Params, params: Params, rows: dict[str, Array]
) -> tuple[tuple[Array, dict[str, Array]], Params]:
    drafter = recipe.plan.drafter
    assert isinstance(drafter, Trained)
    if "features" in rows:
        features, hidden = rows["features"], rows.get("hidden")
    else:
        features, hidden = target_states(recipe.plan, target_params, rows)
    heads = borrow_heads(recipe.plan, {"target": target_params})
    table_rows = recipe.plan.target.embed_raw(
        target_params, rows["ids"], rows["media"], rows["media_idx"]
    )

    def loss(params: Params) -> tuple[Array, dict[str, Array]]:
        return block_loss(
            drafter, params, heads, features, rows["ids"], rows["total_len"], rows["anchors"],
            rows["valid"], recipe.objective,
            rows=table_rows,
            positions=rows["positions"],
            token_weight=rows.get("weight"),
            teacher_hidden=hidden,
            teacher_logits=functools.partial(recipe.plan.target.logits, target_params),
            devices=1 if recipe.mesh is None else recipe.mesh.size,
        )  # fmt: skip

    return jax.value_and_grad(loss, has_aux=True)(params)


def target_features(plan: Plan, target_params: Params, batch: dict[str, Any]) -> Array:
    """Captured layers `[B, S, features]` of whole rows, teacher-forced."""
    return target_states(plan, target_params, batch)[0]


def target_states(plan: Plan, target_params: Params, batch: dict[str, Any]) -> tuple[Array, Array]:
    """Captured layers `[B, S, features]` and hidden states `[B, S, D]` after the final norm."""
    names = ("ids", "media", "media_idx", "positions", "total_len")
    out = whole_rows(plan, target_params, *(batch[name] for name in names))
    return jax.lax.stop_gradient((out.features, out.hidden))
