"""Train a draft: the target answers the prompts, then the draft learns to foresee the answers.

The target is frozen by construction: its parameters are a separate argument of the step. Features
are made online, in the same compiled step as the draft's forward and backward pass.
"""

import csv
import functools
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from tqdm import tqdm

from mmflash_jax.config import DraftShape, ObjectiveConfig, OptimiserConfig, TrainConfig
from mmflash_jax.decode.prefill import IMAGES_AT_ONCE, encode_media
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.step import borrow_heads
from mmflash_jax.drafters import NoDraft
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.drafters.dflash_config import Config as DraftConfig
from mmflash_jax.drafters.dflash_config import default_layer_ids
from mmflash_jax.engine.offline import answer
from mmflash_jax.engine.prompts import PromptEncoder
from mmflash_jax.evaluation.acceptance import accepted_per_position, pooled_tau
from mmflash_jax.evaluation.exactness import compare
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import default_dtype, load_target, stop_ids, warn_of_ordinary_mask
from mmflash_jax.registry import pair
from mmflash_jax.targets import Target
from mmflash_jax.training.answers import answers_of
from mmflash_jax.training.blocks import sample_anchors
from mmflash_jax.training.data import Row, batches, make_row, prompt_requests
from mmflash_jax.training.objective import block_loss
from mmflash_jax.weights import export_params, write_checkpoint

log = logging.getLogger(__name__)

METRICS = ("loss", "accuracy", "kept", "grad_norm")


def train(config: TrainConfig) -> dict[str, Any]:
    """Run `config` from prompts to an exported draft; returns the evaluation figures."""
    config.output.mkdir(parents=True, exist_ok=True)
    dtype = default_dtype() if config.dtype == "auto" else config.dtype
    folder, _ = pair(config.target, "none")
    target, target_params = load_target(folder, dtype)
    encoder = PromptEncoder.from_checkpoint(folder, target)
    # Before the target answers anything: a draft that does not fit costs no time.
    drafter = DFlash(draft_config(config.draft, target, encoder), dtype)
    drafter.check_fit(target.config)
    warn_of_ordinary_mask(drafter, encoder.tokenizer)
    plain = Plan(target, NoDraft(), stop_ids(folder, encoder.eos_id))
    learn, held_out = prompt_requests(config.data, config.generate.max_tokens, config.eval_prompts)

    prompts = [encoder.encode(request) for request in tqdm(learn, desc="encode", unit="prompt")]
    answers = answers_of(plain, target_params, prompts, config)
    media = media_features(plain, target_params, prompts)
    rows = [
        make_row(*parts, config.row_length) for parts in zip(prompts, media, answers, strict=True)
    ]
    kept = [row for row in rows if row is not None]
    log.info("%d of %d rows fit row_length %d", len(kept), len(rows), config.row_length)

    plan = Plan(target, drafter, plain.stop_ids)
    params = fit(plan, target_params, kept, config)
    if not held_out:
        return {}
    figures = evaluate(plan, target_params, params, [encoder.encode(r) for r in held_out], config)
    (config.output / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def draft_config(shape: DraftShape, target: Target, encoder: PromptEncoder) -> DraftConfig:
    """The configuration of a new draft for `target`."""
    layers = target.config.num_hidden_layers
    kinds = shape.layer_types or ("full_attention",) * shape.num_hidden_layers
    ids = shape.target_layer_ids or default_layer_ids(layers, 5)
    return DraftConfig.from_hf(
        {
            "architectures": ["DFlashDraftModel"],
            "hidden_size": target.config.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "num_hidden_layers": shape.num_hidden_layers,
            "head_dim": shape.head_dim,
            "rms_norm_eps": target.config.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "vocab_size": target.config.vocab_size,
            "num_target_layers": layers,
            "max_position_embeddings": target.config.max_position_embeddings,
            "layer_types": list(kinds),
            "sliding_window": shape.sliding_window,
            "dflash_config": {
                "target_layer_ids": list(ids),
                "mask_token_id": encoder.token_id(shape.mask_token),
                "block_size": shape.block_size,
                "input_embedding_scale": shape.input_embedding_scale,
                "final_logit_softcapping": shape.final_logit_softcapping,
            },
        }
    )


def media_features(
    plan: Plan, target_params: Params, prompts: Sequence[Prompt]
) -> list[np.ndarray]:
    """Image features `[M, D]` of each prompt, on the host."""
    params = {"target": target_params}
    features = []
    for start in tqdm(range(0, len(prompts), IMAGES_AT_ONCE), desc="images", unit="batch"):
        part = prompts[start : start + IMAGES_AT_ONCE]
        media, first_row = encode_media(plan, params, part)
        empty = np.zeros((0, plan.target.config.hidden_size), jnp.dtype(plan.target.dtype))
        host = empty if media is None else np.asarray(media)
        for prompt, at in zip(part, first_row, strict=True):
            pieces = [
                host[row : row + image.num_tokens]
                for row, image in zip(at, prompt.images, strict=True)
            ]
            features.append(np.concatenate([empty, *pieces]))
    return features


def fit(plan: Plan, target_params: Params, rows: Sequence[Row], config: TrainConfig) -> Params:
    """Train a fresh draft on `rows`, exporting it as it goes; returns float32 parameters."""
    settings = config.optimiser
    wide = DFlash(plan.drafter.config, "float32")  # pyright: ignore[reportAttributeAccessIssue]
    params = wide.init_params(settings.seed)
    transform = make_optimiser(settings)
    optimiser = transform.init(params)
    key = jax.random.key(settings.seed)
    step = functools.partial(train_step, plan, transform, config.objective)
    path = config.output / "metrics.csv"
    source = batches(rows, settings.batch, config.row_length, settings.seed)
    with path.open("w", newline="") as stream:
        metrics_file = csv.writer(stream, lineterminator="\n")
        metrics_file.writerow(["step", *METRICS, "seconds"])
        began = time.perf_counter()
        for number in tqdm(range(1, settings.steps + 1), desc="train", unit="step"):
            here = jax.random.fold_in(key, number)
            params, optimiser, metrics = step(target_params, params, optimiser, next(source), here)
            if number % config.log_every == 0 or number == settings.steps:
                values = {name: float(metrics[name]) for name in METRICS}
                if not np.isfinite(values["loss"]):
                    raise FloatingPointError(f"loss is {values['loss']} at step {number}")
                seconds = round(time.perf_counter() - began, 2)
                metrics_file.writerow([number, *values.values(), seconds])
                stream.flush()
                log.info("step %d %s", number, {k: round(v, 4) for k, v in values.items()})
            if number % config.save_every == 0 or number == settings.steps:
                tensors = export_params(wide.weight_rules(), params)
                write_checkpoint(config.output / "draft", tensors, wide.config.to_hf())
    return params


def make_optimiser(settings: OptimiserConfig) -> optax.GradientTransformation:
    """AdamW with clipped gradients, linear warm-up and cosine decay to zero."""
    warm = max(1, round(settings.steps * settings.warmup))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warm, max(settings.steps, warm + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(rate, weight_decay=settings.weight_decay),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def train_step(
    plan: Plan,
    transform: optax.GradientTransformation,
    objective: ObjectiveConfig,
    target_params: Params,
    params: Params,
    optimiser: Any,
    batch: dict[str, Any],
    key: Array,
) -> tuple[Params, Any, dict[str, Array]]:
    """One update: target features of whole rows, sampled blocks, loss, gradients, AdamW."""
    drafter = plan.drafter
    assert isinstance(drafter, DFlash)
    features, hidden = target_states(plan, target_params, batch)
    heads = borrow_heads(plan, {"target": target_params})
    weight = batch.get("weight")
    chosen, valid = sample_anchors(
        key, batch["prompt_len"], batch["total_len"], objective.anchors, batch["ids"].shape[1],
        token_weight=weight,
    )  # fmt: skip

    def loss(params: Params) -> tuple[Array, dict[str, Array]]:
        return block_loss(
            drafter, params, heads, features, batch["ids"], batch["total_len"], chosen, valid,
            objective,
            token_weight=weight,
            teacher_hidden=hidden,
            teacher_logits=functools.partial(plan.target.logits, target_params),
        )  # fmt: skip

    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, optimiser = transform.update(gradients, optimiser, params)
    params = cast(Params, optax.apply_updates(params, updates))
    norm = optax.global_norm(gradients)
    return params, optimiser, {"loss": value, **metrics, "grad_norm": norm}


def target_features(plan: Plan, target_params: Params, batch: dict[str, Any]) -> Array:
    """Captured layers `[B, S, features]` of whole rows, teacher-forced."""
    return target_states(plan, target_params, batch)[0]


def target_states(plan: Plan, target_params: Params, batch: dict[str, Any]) -> tuple[Array, Array]:
    """Captured layers `[B, S, features]` and hidden states `[B, S, D]` after the final norm."""
    rows = batch["ids"].shape[0]
    zero = jnp.zeros((rows,), jnp.int32)
    out = plan.target.prefill(
        target_params,
        plan.target.embed(target_params, batch["ids"], batch["media"], batch["media_idx"]),
        batch["positions"],
        # The row itself is the block; nothing comes before it.
        plan.target.init_cache(rows, 1, 1),
        zero,
        batch["total_len"],
        capture=plan.drafter.capture,
    )
    return jax.lax.stop_gradient((out.features, out.hidden))


def evaluate(
    plan: Plan, target_params: Params, params: Params, prompts: list[Prompt], config: TrainConfig
) -> dict[str, Any]:
    """Decode held-out prompts with the new draft, by the loop that serves."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.dtype(plan.target.dtype)), params)
    everything = {"target": target_params, "drafter": narrow}
    batch = config.generate.batch
    drafted = answer(plan, everything, prompts, batch=batch)
    plain_plan = Plan(plan.target, NoDraft(), plan.stop_ids)
    plain = answer(plain_plan, everything, prompts, batch=batch)
    parity = compare(plan, everything, prompts, drafted.completions, plain.completions)
    return {
        "prompts": len(prompts),
        "tau": pooled_tau(drafted.completions),
        "accepted_per_position": accepted_per_position(drafted.completions),
        "parity": parity.holds,
        "equal": sum(parity.equal),
        # A speed counts only if the answers are the target's own.
        "tokens_per_s": drafted.timing.tokens_per_s if parity.holds else None,
        "plain_tokens_per_s": plain.timing.tokens_per_s if parity.holds else None,
    }
