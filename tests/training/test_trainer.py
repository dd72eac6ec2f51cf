"""Training over a real (tiny) target: features, gradients, what changes and what does not."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mmflash_jax.config_drafts import DraftShape
from mmflash_jax.config_train import ObjectiveConfig, OptimiserConfig
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.step import borrow_heads
from mmflash_jax.drafters import DFlash, FitError, Heads
from mmflash_jax.engine.offline import answer
from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request
from mmflash_jax.load import load_target, warn_of_ordinary_mask
from mmflash_jax.training.data import collate, make_row
from mmflash_jax.training.objective import block_loss
from mmflash_jax.training.prompts import Prompts
from mmflash_jax.training.step import (
    Recipe,
    make_optimiser,
    make_state,
    target_features,
    train_step,
)
from mmflash_jax.training.trainer import draft_config, media_features, with_kernels
from mmflash_jax.weights.hf_config import ConfigError
from tests import tiny
from tests.drafts import anchor_of, draft_for, random_params, two_layer_target
from tests.tolerances import MODEL, assert_close
from tests.training import toy

ROW_LENGTH = 96
SHAPE = DraftShape(
    num_hidden_layers=1,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    mask_token="<|video_pad|>",
)


class Setup(NamedTuple):
    plan: Plan
    params: dict[str, Any]
    requests: list[Request]
    prompts: list[Prompt]
    answers: list[tuple[int, ...]]
    batch: dict[str, np.ndarray]
    encoder: PromptEncoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def setup(folder: Path) -> Setup:
    """Two prompts, one with two images, answered by the target itself; a draft of both layer kinds
    whose window is shorter than every prompt."""
    target, params = load_target(folder, "float32")
    drafter = draft_for(
        folder,
        block_size=4,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
    )
    encoder = PromptEncoder.from_checkpoint(folder, target)
    random = np.random.default_rng(0)
    images = [
        Image.fromarray(random.integers(0, 255, (*size, 3), np.uint8))
        for size in ((64, 96), (70, 64))
    ]
    requests = [
        Request(text="Hi", max_tokens=12),
        Request(text="And these?", images=images, max_tokens=12),
    ]
    prompts = [encoder.encode(request) for request in requests]
    plan = Plan(target, drafter, ())
    everything = {"target": params, "drafter": random_params(drafter)}
    made = answer(plan, everything, prompts, batch=2)
    answers = [completion.token_ids for completion in made.completions]
    media = media_features(plan, params, prompts)
    rows = [make_row(*parts, ROW_LENGTH) for parts in zip(prompts, media, answers, strict=True)]
    batch = collate([row for row in rows if row is not None], ROW_LENGTH)
    return Setup(plan, everything, requests, prompts, answers, batch, encoder)


def recording(heads: Heads, made: list[Any]) -> Heads:
    """The same heads; every logits array is appended to `made`."""

    def logits(hidden: Any) -> Any:
        made.append(heads.logits(hidden))
        return made[-1]

    return Heads(embed=heads.embed, logits=logits)


@functools.partial(jax.jit, static_argnums=0)
def trained_logits(plan: Plan, params: Any, batch: Any, anchors: Any) -> Any:
    """What training compares with labels, from features of the whole rows."""
    made: list[Any] = []
    heads = recording(borrow_heads(plan, params), made)
    features = target_features(plan, params["target"], batch)
    drafter: Any = plan.drafter
    block_loss(
        drafter, params["drafter"], heads, features, batch["ids"], batch["total_len"], anchors,
        jnp.ones(anchors.shape, bool), ObjectiveConfig(),
    )  # fmt: skip
    return made[0]


@functools.partial(jax.jit, static_argnums=0)
def served_logits(plan: Plan, params: Any, state: Any) -> Any:
    made: list[Any] = []
    heads = recording(borrow_heads(plan, params), made)
    anchor = anchor_of(state.anchor, state.length)
    plan.drafter.propose(params["drafter"], state.draft, anchor, heads)
    return made[0]


def test_a_block_is_trained_on_what_it_gets_when_it_serves(setup):
    """Features of a teacher-forced row = features that prefill and verify steps capture.

    Wherever decoding stands after some steps, the draft's logits there are those that training
    computed for a block at that anchor: rows of different length, images, window and all.
    """
    state = prefill(setup.plan, setup.params, setup.prompts, capacity=ROW_LENGTH)
    for steps in (0, 1, 2, 3):
        state = decode(setup.plan, setup.params, state, steps)
        anchors = np.asarray(state.length)[:, None]
        known = [setup.answers[row][int(n) - 1] for row, n in enumerate(state.num_tokens)]
        assert np.asarray(state.anchor).tolist() == known
        trained = trained_logits(setup.plan, setup.params, setup.batch, anchors)
        served = served_logits(setup.plan, setup.params, state)
        for row in range(2):
            assert_close(served[row], trained[row, 0], MODEL, f"{steps} steps more, row {row}")


def test_one_step_changes_every_draft_parameter_and_no_target_parameter(setup):
    drafter: Any = setup.plan.drafter
    transform = make_optimiser(OptimiserConfig(steps=10, warmup=0.1, learning_rate=1e-2))
    before = jax.tree.map(np.asarray, setup.params)
    recipe = Recipe(setup.plan, transform, ObjectiveConfig(anchors=6))
    state = make_state(recipe, setup.params["drafter"])
    target = setup.params["target"]
    metrics: dict[str, Any] = {}
    for _ in range(2):  # The first step of the warm-up has a rate of zero.
        state, metrics = train_step(recipe, target, state, setup.batch)
    params = state.params
    assert (int(state.step), int(state.bad_step)) == (2, 0)
    assert set(metrics) == {"loss", "accuracy", "accuracy_per_position", "kept", "grad_norm"}
    assert metrics["accuracy_per_position"].shape == (drafter.block - 1,)
    assert all(np.isfinite(value).all() for value in metrics.values())
    assert metrics["grad_norm"] > 0
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before["drafter"], params)
    for path, distance in jax.tree_util.tree_leaves_with_path(moved):
        assert distance > 0, jax.tree_util.keystr(path)
    jax.tree.map(np.testing.assert_array_equal, before["target"], target)
    assert jax.tree.structure(params) == jax.tree.structure(drafter.abstract_params())


def test_media_features_stand_in_for_pictures(setup):
    """The tower is frozen, so rows carry its output: as many rows as the prompt has places."""
    features = media_features(setup.plan, setup.params["target"], setup.prompts)
    assert [len(rows) for rows in features] == [
        int((prompt.media_idx >= 0).sum()) for prompt in setup.prompts
    ]
    assert len(features[0]) == 0
    alone = media_features(setup.plan, setup.params["target"], setup.prompts[1:])
    assert_close(alone[0], features[1], MODEL)


def test_patches_are_kept_only_while_prompts_are_used(setup):
    """Iteration tells sizes; an index or a slice brings the pixels; the first pass sees all."""
    seen: list[Prompt] = []
    prompts = Prompts(setup.encoder, setup.requests, str, seen.extend)
    for whole in (seen, prompts[:], [prompts[0], prompts[1]]):
        for made, wanted in zip(whole, setup.prompts, strict=True):
            np.testing.assert_array_equal(made.ids, wanted.ids)
            for image, other in zip(made.images, wanted.images, strict=True):
                np.testing.assert_array_equal(image.patches, other.patches)
    assert len(prompts) == 2
    for light, wanted in zip(prompts, setup.prompts, strict=True):
        np.testing.assert_array_equal(light.ids, wanted.ids)
        assert [i.num_tokens for i in light.images] == [i.num_tokens for i in wanted.images]
        assert not any(len(image.patches) for image in light.images)


def test_learning_rate_rises_and_falls():
    settings = OptimiserConfig(steps=100, learning_rate=1e-3, warmup=0.1, clip=1e9)
    transform = make_optimiser(settings)
    state, params = transform.init({"w": jnp.ones(1)}), {"w": jnp.ones(1)}
    update = jax.jit(transform.update)
    sizes = []
    for _ in range(100):
        step, state = update({"w": jnp.ones(1)}, state, params)
        sizes.append(-float(step["w"][0]))
    # With a constant gradient Adam moves by the rate, plus the weight decay's share of it.
    assert sizes[0] == 0.0
    assert max(sizes) == pytest.approx(1e-3 * (1 + settings.weight_decay), rel=1e-3)
    assert int(np.argmax(sizes)) == 10
    assert sizes[-1] < 1e-5


def test_a_new_draft_takes_its_measures_from_the_target(setup):
    target: Any = setup.plan.target
    config = draft_config(SHAPE, target, setup.encoder)
    assert config.hidden_size == config.target_hidden_size == target.config.hidden_size
    assert config.vocab_size == target.config.vocab_size
    assert config.num_target_layers == target.config.num_hidden_layers
    assert config.mask_token_id == tiny.TOKEN_IDS["<|video_pad|>"]
    assert len(config.target_layer_ids) == 5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask_token": "<|mask|>"}, PromptError, "no token '<|mask|>'"),
        ({"mask_token": "two words"}, PromptError, "no token 'two words'"),
        ({"layer_types": ("full_attention",) * 2}, ConfigError, "layer_types has 2 entries"),
        ({"layer_types": ("local",)}, ConfigError, "layer_types holds 'local'"),
        ({"layer_types": ("sliding_attention",)}, ConfigError, "sliding layer needs sliding_wind"),
        ({"target_layer_ids": (1, 2)}, FitError, "target_layer_ids: draft [2], target has layers"),
        ({"target_layer_ids": (-1,)}, FitError, "target_layer_ids: draft [-1]"),
    ],
)
def test_a_draft_that_the_target_cannot_have(setup, change, error, message):
    target: Any = setup.plan.target
    shape = dataclasses.replace(SHAPE, **change)
    with pytest.raises(error) as caught:
        DFlash(draft_config(shape, target, setup.encoder)).check_fit(target.config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "warned"),
    [(97, True), (tiny.TOKEN_IDS["<|video_pad|>"], False), (tiny.VOCAB_SIZE - 1, False)],
    ids=["a letter", "an added token", "a row that no token uses"],
)
def test_a_mask_that_text_holds_too_is_warned_of(setup, folder, caplog, mask, warned):
    """D16."""
    warn_of_ordinary_mask(draft_for(folder, mask_token_id=mask), setup.encoder.tokenizer)
    assert ("a token of ordinary text" in caplog.text) is warned


def test_a_draft_whose_attention_has_no_gradient_says_so_at_once(caplog):
    """Two query heads share a key head, so blocks of 128 tokens have 256 query rows for each."""
    small = toy.drafter()
    assert with_kernels(small, "interpret").kernels == "interpret"
    large = dataclasses.replace(small, config=dataclasses.replace(small.config, block_size=128))
    with pytest.raises(ConfigError, match="kernels is gpu, but a block has 256 query rows"):
        with_kernels(large, "gpu")
    assert with_kernels(large, "auto").kernels == "reference"
    assert "256 query rows" in caplog.text
