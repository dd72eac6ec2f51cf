"""Chunks of blocks change memory and nothing else; what token weights do to the loss."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config_train import ObjectiveConfig
from mmflash_jax.drafters import Heads
from mmflash_jax.training import objective
from mmflash_jax.training.blocks import sample_anchors
from mmflash_jax.training.objective import block_loss, chunk_blocks
from tests.tolerances import assert_close
from tests.training import toy

WIDTH = 29
PLAN = toy.drafter()
PARAMS = toy.params_of(PLAN)
FEATURES, IDS = toy.features_and_ids(2, WIDTH)
TOTAL_LEN = jnp.array([WIDTH, 14])
ANCHORS = jnp.array([[5, 6, 9, 27, 20, 0, 1], [13, 2, 11, 3, 0, 0, 12]])
VALID = jnp.array([[True] * 7, [False, True, True, True, False, False, True]])
WEIGHT = np.random.default_rng(2).uniform(0.5, 3.0, (2, WIDTH)).astype(np.float32)
CHUNKED = ObjectiveConfig(decay=toy.DECAY, chunk=3)


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.value_and_grad, argnums=2, has_aux=True)
def run(plan: Any, settings: ObjectiveConfig, params: Any, **weights: Any) -> Any:
    return block_loss(
        plan, params, toy.Recorder().heads, jnp.asarray(FEATURES), jnp.asarray(IDS), TOTAL_LEN,
        ANCHORS, VALID, settings, teacher_hidden=jnp.asarray(FEATURES)[..., : toy.WIDTH],
        teacher_logits=toy.Recorder().heads.logits, **weights,
    )  # fmt: skip


@pytest.mark.parametrize(("loss", "position"), [("ce", "decay"), ("kl", "dpace")])
def test_chunks_make_no_difference(loss, position):
    """Seven blocks in chunks of three, the last filled up: loss, metrics and gradients."""
    fields: dict[str, Any] = {"decay": toy.DECAY, "loss": loss, "position": position}
    (one, metrics), gradient = run(PLAN, ObjectiveConfig(**fields), PARAMS, token_weight=WEIGHT)
    (other, metrics_2), gradient_2 = run(
        PLAN, ObjectiveConfig(**fields, chunk=3), PARAMS, token_weight=WEIGHT
    )
    assert float(other) == pytest.approx(float(one), rel=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(metrics_2[name], value, rtol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_2), strict=True):
        assert_close(b, a, 2e-6)


def test_a_bfloat16_draft_has_float32_gradients():
    """Chunk by chunk, from fp32 parameters: bf16 rounding of activations and no more."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), PARAMS)
    narrow = dataclasses.replace(PLAN, dtype="bfloat16")
    _, exact = run(PLAN, CHUNKED, rounded, token_weight=WEIGHT)
    _, gradient = run(narrow, CHUNKED, rounded, token_weight=WEIGHT)
    exact, gradient = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (exact, gradient)
    )
    assert gradient.dtype == np.float32
    assert np.linalg.norm(gradient - exact) < 0.02 * np.linalg.norm(exact)


def test_weights_of_one_are_plain_training_bit_for_bit():
    """A strength of zero for visual tokens must be DFlash itself."""
    plain = run(PLAN, CHUNKED, PARAMS)
    ones = run(PLAN, CHUNKED, PARAMS, token_weight=np.ones((2, WIDTH), np.float32))
    jax.tree.map(np.testing.assert_array_equal, plain, ones)


def test_a_token_of_weight_zero_is_not_supervised():
    """Its label may be anything: neither loss, metrics nor gradients change, nor the divisor."""
    weight = WEIGHT.copy()
    weight[0, 10] = weight[1, 4] = 0.0
    (loss, metrics), gradient = run(PLAN, CHUNKED, PARAMS, token_weight=weight)
    (full, all_metrics), _ = run(PLAN, CHUNKED, PARAMS, token_weight=WEIGHT)
    assert float(loss) != pytest.approx(float(full), rel=1e-4)
    # Slots 5, 4 and 1 of row 0's anchors 5, 6 and 9, and slots 2 and 1 of row 1's 2 and 3.
    missing = sum(np.exp(-(k - 1) / toy.DECAY) for k in (5, 4, 1, 2, 1))
    gone = float(all_metrics["weight_sum"]) - float(metrics["weight_sum"])
    assert gone == pytest.approx(missing, rel=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_weight_metrics():
    weight = np.where(WEIGHT > 1.5, 2.0, 1.0).astype(np.float32)
    (_, metrics), _ = run(PLAN, CHUNKED, PARAMS, token_weight=weight)
    slots = np.arange(1, toy.BLOCK)
    applied = np.zeros(toy.BLOCK - 1)
    raised = 0.0
    for row, a in zip(*np.nonzero(np.asarray(VALID)), strict=True):
        for k in slots:
            place = int(ANCHORS[row, a]) + k
            if place < TOTAL_LEN[row]:
                share = np.exp(-(k - 1) / toy.DECAY) * weight[row, place]
                applied[k - 1] += share
                raised += share * (weight[row, place] > 1)
    np.testing.assert_allclose(metrics["weight_per_position"], applied / applied.sum(), rtol=1e-5)
    assert float(metrics["weight_raised"]) == pytest.approx(raised / applied.sum(), rel=1e-5)
    assert metrics["accuracy_per_position"].shape == (toy.BLOCK - 1,)


def test_a_row_of_5_and_a_row_of_300_supervised_tokens():
    """D01: 64 anchors, 60 of them filling. Where those lie does not matter, to the bit."""
    width, total = 320, jnp.array([15, 310])
    features, ids = toy.features_and_ids(2, width)
    anchors, valid = sample_anchors(jax.random.key(1), jnp.array([10, 10]), total, 64, width)
    assert valid.sum(axis=1).tolist() == [4, 64]

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any, anchors: Any) -> Any:
        return block_loss(
            PLAN, params, toy.Recorder().heads, jnp.asarray(features), jnp.asarray(ids), total,
            anchors, valid, ObjectiveConfig(chunk=24),
        )[0]  # fmt: skip

    value, gradient = loss(PARAMS, anchors)
    elsewhere = jnp.where(valid, anchors, (anchors + 101) % width)
    value_2, gradient_2 = loss(PARAMS, elsewhere)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    jax.tree.map(np.testing.assert_array_equal, (value, gradient), (value_2, gradient_2))


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_perfect_copy_has_no_loss(loss):
    """D02: a head that shouts what the token before it predicts, for the draft and the teacher."""
    table = 60.0 * jax.nn.one_hot(jnp.arange(toy.VOCAB_SIZE), toy.VOCAB_SIZE)
    anchors = jnp.array([[3, 9, 20, 25]] * 2)
    slots = jnp.arange(1, toy.BLOCK)
    labels = jnp.take(jnp.asarray(IDS[0]), jnp.minimum(anchors[..., None] + slots, WIDTH - 1))
    heads = Heads(embed=toy.Recorder().heads.embed, logits=lambda _: table[labels])
    # The state at t predicts token t + 1; one place further on it would predict another.
    following = np.roll(IDS[:1], -1, axis=1).repeat(2, axis=0)[..., None].astype(np.float32)
    value, metrics = jax.jit(
        lambda params: block_loss(
            PLAN, params, heads, jnp.asarray(FEATURES), jnp.asarray(IDS[:1].repeat(2, axis=0)),
            jnp.array([WIDTH, WIDTH]), anchors, anchors > 0, ObjectiveConfig(loss=loss),
            teacher_hidden=jnp.asarray(following),
            teacher_logits=lambda hidden: table[hidden[..., 0].astype(int)],
        )
    )(PARAMS)  # fmt: skip
    assert float(value) == pytest.approx(0.0, abs=1e-5)
    assert metrics["accuracy"] == 1.0


def test_the_kl_loss_needs_a_teacher():
    with pytest.raises(ValueError, match="needs teacher_hidden"):
        block_loss(
            PLAN, PARAMS, toy.Recorder().heads, jnp.asarray(FEATURES), jnp.asarray(IDS), TOTAL_LEN,
            ANCHORS, VALID, ObjectiveConfig(loss="kl"),
        )  # fmt: skip


VOCABULARY = 20_000


def temp_bytes(anchors: int, chunk: int | None) -> int:
    """What the compiled loss with gradients sets aside beyond its arguments and results."""
    settings = ObjectiveConfig(chunk=chunk)

    def loss(params: Any, table: Any, features: Any, ids: Any, chosen: Any) -> Any:
        heads = Heads(embed=lambda ids: table[ids], logits=lambda x: x @ table.T)
        return block_loss(
            PLAN, params, heads, features, ids, jnp.array([512]), chosen, chosen >= 0, settings
        )[0]

    shape = jax.ShapeDtypeStruct
    compiled = (
        jax.jit(jax.grad(loss))
        .lower(
            PLAN.abstract_params(), shape((VOCABULARY, toy.WIDTH), jnp.float32),
            shape((1, 512, toy.CAPTURED), jnp.float32), shape((1, 512), jnp.int32),
            shape((1, anchors), jnp.int32),
        )
        .compile()
    )  # fmt: skip
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def test_memory_does_not_grow_with_the_blocks():
    """Neither logits nor attention scores, forward or backward, of more than a chunk exist."""
    few, many = temp_bytes(16, 8), temp_bytes(128, 8)
    assert many < 1.02 * few
    # The logits of all blocks alone would take more than everything does in chunks.
    assert many < 128 * (toy.BLOCK - 1) * VOCABULARY * 4
    assert temp_bytes(128, None) > 5 * many


def test_the_default_chunk_follows_its_budget(monkeypatch):
    """By the larger of logits and scores, for all rows of a device together."""
    scores = 2 * 4 * 8 * (4096 + 8) * 4
    monkeypatch.setattr(objective, "CHUNK_BYTES", 10 * scores)
    assert chunk_blocks(PLAN, 1, 4096) == 10
    assert chunk_blocks(PLAN, 3, 4096) == 3
    assert chunk_blocks(PLAN, 99, 4096) == 1
    logits = 7 * toy.VOCAB_SIZE * 4
    monkeypatch.setattr(objective, "CHUNK_BYTES", 10_000 * logits)
    assert chunk_blocks(PLAN, 1, 1) == 10_000 * logits // (2 * 4 * 8 * 9 * 4)
