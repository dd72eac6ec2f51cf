"""A training run from prompts to an evaluated draft: prepare, fit, export, evaluate."""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.config_drafts import DraftShape, Eagle3Shape, MTPShape
from mmflash_jax.config_train import TrainConfig
from mmflash_jax.decode.prefill import IMAGES_AT_ONCE, encode_media
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import DFlash, Eagle3, NoDraft, Qwen35MTP
from mmflash_jax.drafters.dflash_config import Config as DraftConfig
from mmflash_jax.drafters.dflash_config import default_layer_ids
from mmflash_jax.drafters.eagle3_config import Config as Eagle3Config
from mmflash_jax.drafters.eagle3_config import default_layer_ids as default_eagle3_layer_ids
from mmflash_jax.engine.prompts import PromptEncoder
from mmflash_jax.evaluation.plots import plot_run
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import (
    default_dtype,
    kernels_over,
    load_drafter,
    load_target,
    stop_ids,
    warn_of_ordinary_mask,
)
from mmflash_jax.registry import pair
from mmflash_jax.targets import Target
from mmflash_jax.targets.qwen3_5 import Qwen35
from mmflash_jax.training.answers import answers_of
from mmflash_jax.training.checkpoint import Checkpoints
from mmflash_jax.training.data import Row, make_row, prompt_requests
from mmflash_jax.training.export import as_shipped, join_parts, write_draft
from mmflash_jax.training.held_out import Evaluation
from mmflash_jax.training.loop import fit
from mmflash_jax.training.objective import Trained
from mmflash_jax.training.processes import first_then_others, wait_for_all
from mmflash_jax.training.prompts import Prompts, places_of
from mmflash_jax.training.visual_kl import visual_weights
from mmflash_jax.weights.hf_config import ConfigError, read_json
from pallas_kernels import Kernels
from pallas_kernels.block_attention import gradient_obstacle

log = logging.getLogger(__name__)


def train(config: TrainConfig, *, fresh: bool = False) -> dict[str, Any]:
    """Run `config` from prompts to an exported draft; returns the evaluation figures.

    A run that was stopped goes on from its newest checkpoint. `fresh` removes checkpoints and
    metrics first; answers and features of the target stay.
    """
    dtype = default_dtype() if config.dtype == "auto" else config.dtype
    if fresh:
        first_then_others(lambda: _forget(config))
    config.output.mkdir(parents=True, exist_ok=True)
    # Before anything that takes time: settings that differ from those of the checkpoint.
    checkpoints = Checkpoints(config, dtype)
    folder, _ = pair(config.target, "none")
    kernels = kernels_over(config.mesh.devices, config.kernels)
    target, target_params = load_target(folder, dtype, kernels=kernels)
    encoder = PromptEncoder.from_checkpoint(folder, target)
    # A draft that does not fit costs no time either.
    drafter = new_drafter(config.draft, folder, target, encoder)
    drafter.check_fit(target.config)
    if isinstance(drafter, DFlash):
        warn_of_ordinary_mask(drafter, encoder.tokenizer)
        drafter = with_kernels(drafter, kernels)
    plain = Plan(target, NoDraft(), stop_ids(folder, encoder.eos_id), encoder.vocabulary)
    rows, held_out = prepare(plain, target_params, encoder, config)

    evaluation = Evaluation(plain, target_params, held_out, encoder, config)

    def on_the_way(step: int, params: Params) -> None:
        whole = join_parts(params)
        if len(held_out) and jax.process_index() == 0:
            # A copy on one device, which is where decoding runs.
            local = jax.device_put(as_shipped(jax.device_get(whole), dtype), jax.devices()[0])
            evaluation.run(drafter, local, config.output / "evaluations" / f"{step}.json")

    plan = dataclasses.replace(plain, drafter=drafter)
    params = fit(plan, target_params, rows, config, checkpoints, on_the_way)
    checkpoints.close()
    write_draft(config.output / "draft", drafter, params)
    figures: dict[str, Any] = {}
    if len(held_out) and jax.process_index() == 0:
        # What ships: the exported folder, read as a server reads it.
        tokens = None if isinstance(config.draft, DraftShape) else config.draft.draft_tokens
        served, served_params = load_drafter(
            config.output / "draft", target, dtype, kernels=kernels, draft_tokens=tokens
        )
        figures = evaluation.run(served, served_params, config.output / "evaluation.json")
        plot_run(config.output, figures)
    wait_for_all()
    return figures


def with_kernels(drafter: DFlash, kernels: Kernels) -> DFlash:
    """The draft with kernels for its attention, if that has a gradient.

    Raises:
        ConfigError: it has none, and kernels were asked for by name.
    """
    shape = drafter.config
    rows = shape.block_size * (shape.num_attention_heads // shape.num_key_value_heads)
    obstacle = gradient_obstacle(rows, shape.head_dim)
    if obstacle is not None and kernels != "reference":
        if kernels != "auto":
            raise ConfigError(f"kernels is {kernels}, but {obstacle}; use auto or reference")
        log.warning("the draft's attention is trained without kernels: %s", obstacle)
        kernels = "reference"
    return dataclasses.replace(drafter, kernels=kernels)


def _forget(config: TrainConfig) -> None:
    for name in ("checkpoints", "tensorboard", "evaluations"):
        shutil.rmtree(config.output / name, ignore_errors=True)
    (config.output / "metrics.csv").unlink(missing_ok=True)


def prepare(
    plain: Plan, target_params: Params, encoder: PromptEncoder, config: TrainConfig
) -> tuple[list[Row], Prompts]:
    """Training rows, answered by the target, and held-out prompts.

    Raises:
        PromptError: prompts that cannot be encoded, all of them by name.
    """
    generate = config.generate
    learn, kept = prompt_requests(
        config.data, generate.max_tokens, config.eval_prompts, generate.sampling
    )
    places = places_of(config.data, learn + kept)
    held_out = Prompts(encoder, kept, lambda index: places(len(learn) + index))
    media: list[np.ndarray] = []

    def see(part: list[Prompt]) -> None:
        media.extend(media_features(plain, target_params, part))

    prompts = Prompts(encoder, learn, places, see)
    answers = first_then_others(lambda: answers_of(plain, target_params, prompts, config))
    visual = first_then_others(
        lambda: visual_weights(plain, target_params, learn, prompts, answers, encoder, config)
    ) or [None] * len(learn)
    made = [
        make_row(prompt, features, answer, config.row_length, weights)
        for prompt, features, answer, weights in zip(prompts, media, answers, visual, strict=True)
    ]
    rows = [row for row in made if row is not None]
    log.info(
        "%d of %d rows have labels within row_length %d, %d in all",
        len(rows), len(made), config.row_length, sum(row.supervised for row in rows),
    )  # fmt: skip
    return rows, held_out


def new_drafter(
    shape: DraftShape | MTPShape | Eagle3Shape,
    folder: Path,
    target: Target,
    encoder: PromptEncoder,
) -> Trained:
    """The plan of a new draft for the target in `folder`.

    Raises:
        ConfigError: an MTP head is asked for and the target is no Qwen3.5, or the target is too
            shallow for the layers that EAGLE-3 reads.
    """
    if isinstance(shape, DraftShape):
        return DFlash(draft_config(shape, target, encoder), target.dtype)
    if isinstance(shape, Eagle3Shape):
        made = Eagle3(eagle3_config(shape, target), target.dtype)
        return dataclasses.replace(made, draft_tokens=shape.draft_tokens)
    config = read_json(folder / "config.json")
    if not isinstance(target, Qwen35):
        raise ConfigError(
            f"draft.kind is 'mtp', but {folder} is a {config['architectures']}; MTP heads are "
            "trained for Qwen3.5"
        )
    # The target need not have had a head.
    text = {**config["text_config"], "mtp_num_hidden_layers": 1}
    made = Qwen35MTP.from_hf({**config, "text_config": text}, target.dtype)
    return dataclasses.replace(made, draft_tokens=shape.draft_tokens)


def draft_config(shape: DraftShape, target: Target, encoder: PromptEncoder) -> DraftConfig:
    """The configuration of a new draft for `target`."""
    layers = target.config.num_hidden_layers
    kinds = shape.layer_types or ("full_attention",) * shape.num_hidden_layers
    ids = shape.target_layer_ids or default_layer_ids(layers, 5)
    mask = encoder.token_id(shape.mask_token) if shape.mask_token else shape.mask_token_id
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
                "mask_token_id": mask,
                "block_size": shape.block_size,
                "input_embedding_scale": shape.input_embedding_scale,
                "final_logit_softcapping": shape.final_logit_softcapping,
            },
        }
    )


def eagle3_config(shape: Eagle3Shape, target: Target) -> Eagle3Config:
    """The configuration of a new EAGLE-3 draft for `target`."""
    c = target.config
    return Eagle3Config(
        vocab_size=c.vocab_size,
        draft_vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=shape.rope_theta,
        target_layer_ids=shape.target_layer_ids or default_eagle3_layer_ids(c.num_hidden_layers),
        prefix="midlayer.",
        max_position_embeddings=c.max_position_embeddings,
        attention_bias=False, normed_heads=False, window=None, norm_before_residual=False,
        norm_before_fc=False, fc_norm=False, norm_output=False, draft_tokens=None,
    )  # fmt: skip


def media_features(
    plan: Plan, target_params: Params, prompts: Sequence[Prompt]
) -> list[np.ndarray]:
    """Image features `[M, D]` of each prompt, on the host."""
    params = {"target": target_params}
    features = []
    for start in range(0, len(prompts), IMAGES_AT_ONCE):
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
