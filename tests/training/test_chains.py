"""Training of an MTP head and of EAGLE-3: what they learn from is what they see when they serve."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config_files import build
from mmflash_jax.config_train import ObjectiveConfig, TrainConfig
from mmflash_jax.drafters import Anchor, Context, Eagle3, Heads, Qwen35MTP
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.training import loop
from mmflash_jax.training.export import export_run
from mmflash_jax.training.loop import Stopped
from mmflash_jax.training.objective import block_loss
from mmflash_jax.training.trainer import new_drafter, train
from mmflash_jax.weights import TensorStore, export_params
from mmflash_jax.weights.hf_config import ConfigError, read_json
from tests import tiny
from tests.drafters.eagle3 import eagle_config, layer_config
from tests.drafts import random_params, two_layer_target
from tests.tiny_gemma4 import tiny_gemma4
from tests.tolerances import LAYER, assert_close

WIDTH, VOCAB_SIZE, DRAFTS, LENGTH = 16, 40, 3, 14
_random = np.random.default_rng(0)
TABLE, HEAD = _random.standard_normal((2, VOCAB_SIZE, WIDTH)).astype(np.float32)
TEXT = 5
"""Tokens before it stand in an image: their rotary positions jump."""
# Neighbours, the first token of the text, chains that reach past the row.
ANCHORS = np.array([[5, 6, 9, 12], [11, 7, 5, 13]], np.int32)
WEIGHTS = jnp.asarray(_random.uniform(0.5, 3.0, (2, LENGTH)).astype(np.float32))


def logits_of(hidden):
    return jnp.einsum("...d,vd->...v", hidden, HEAD, precision=jax.lax.Precision.HIGHEST)


HEADS = Heads(embed=lambda ids: jnp.asarray(TABLE)[ids], logits=logits_of)


class Made(NamedTuple):
    """A chain drafter, and two rows to train it on; `hidden` is the teacher's."""

    plan: Qwen35MTP | Eagle3
    params: Any
    features: np.ndarray
    hidden: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    positions: np.ndarray


def mtp() -> Qwen35MTP:
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    }  # fmt: skip
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }  # fmt: skip
    return Qwen35MTP.from_hf({"text_config": text}, "float32")


def eagle3() -> Eagle3:
    layer = layer_config({"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH})
    config = eagle_config(layer, (1, 3, 4), draft_vocab_size=VOCAB_SIZE)
    return Eagle3.from_hf(config, "float32")


@pytest.fixture(scope="module", params=[mtp, eagle3], ids=["mtp", "eagle3"])
def made(request) -> Made:
    plan = request.param()
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB_SIZE, (2, LENGTH)).astype(np.int32)
    hidden = rng.standard_normal((2, LENGTH, WIDTH), np.float32)
    features = rng.standard_normal((2, LENGTH, len(plan.capture) * WIDTH), np.float32)
    rows = TABLE[ids] + (np.arange(LENGTH) < TEXT)[:, None]
    positions = np.sort(rng.integers(0, 9, (3, 2, LENGTH)), axis=-1).astype(np.int32)
    positions[..., TEXT:] = 12 + np.arange(LENGTH - TEXT)
    params = random_params(plan)
    return Made(plan, params, features, hidden, ids, rows.astype(np.float32), positions)


def loss_of(made, features, rows, anchors, **settings):
    return block_loss(
        made.plan, made.params, HEADS, jnp.asarray(features), jnp.asarray(made.ids),
        jnp.full(2, LENGTH), jnp.asarray(anchors), jnp.ones(anchors.shape, bool),
        ObjectiveConfig(**settings), rows=jnp.asarray(rows), positions=jnp.asarray(made.positions),
        token_weight=WEIGHTS, teacher_hidden=jnp.asarray(made.hidden),
        teacher_logits=lambda x: logits_of(x)[..., ::-1],
    )[0]  # fmt: skip


def training_logits(made):
    """`[B, A, drafts, V]` of chains after `ANCHORS`, as `block_loss` asks for them."""
    plan = made.plan
    place = np.minimum(ANCHORS[..., None] + np.arange(DRAFTS + 1), LENGTH - 1)
    known = np.take_along_axis(made.ids[:, None], place, axis=-1)

    @jax.jit
    def run(params, features, rows, positions, known):
        state = plan.context_state(params, features, rows, positions)
        ids = plan.block_inputs(known[..., 0], known[..., 1:])
        return plan.block_logits(params, HEADS, state, ids, jnp.asarray(ANCHORS))

    return run(made.params, made.features, made.rows, made.positions, known)


def test_training_logits_are_those_of_serving(made):
    """A chain that drafts the right tokens after absorbing what stands before its anchor."""
    plan, params, features, _, ids, rows, positions = made
    got, absorb = training_logits(made), jax.jit(plan.absorb)
    for column in range(ANCHORS.shape[1]):
        length = ANCHORS[:, column]
        context = Context(
            features=jnp.asarray(features), rows=jnp.asarray(rows),
            positions=jnp.asarray(positions), length=jnp.zeros(2, jnp.int32),
            count=jnp.asarray(length),
        )  # fmt: skip
        state = absorb(params, plan.init_state(2, LENGTH), context)
        seen: list[Any] = []

        def pick(scored, first=0, length=length, seen=seen):
            seen.append(np.asarray(scored.make())[:, 0])
            place = np.minimum(length + 1 + first, LENGTH - 1)
            return jnp.asarray(ids[np.arange(2), place])[:, None]

        heads = Heads(embed=lambda ids: jnp.asarray(TABLE)[ids], logits=logits_of, pick=pick)
        anchor = Anchor(
            ids=jnp.asarray(ids[np.arange(2), length]),
            length=jnp.asarray(length),
            positions=jnp.asarray(positions[:, np.arange(2), length]),
        )
        with jax.disable_jit():
            plan.propose(params, state, anchor, heads)
        for row in range(2):
            for step in range(min(DRAFTS, LENGTH - 1 - length[row])):
                wanted = seen[step][row]
                assert_close(got[row, column, step], wanted, 3 * LAYER, f"{length} {step}")


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_loss_is_that_of_its_logits(made, loss):
    """Draft k of a chain is about the token k after the anchor, and so is the teacher's state."""

    @jax.jit
    def run(features, rows):
        return loss_of(made, features, rows, ANCHORS, loss=loss, decay=2.0)

    total = run(made.features, made.rows)
    log_q = np.asarray(jax.nn.log_softmax(training_logits(made), axis=-1), np.float64)
    log_p = np.asarray(jax.nn.log_softmax(logits_of(made.hidden)[..., ::-1], axis=-1), np.float64)
    wanted = divisor = 0.0
    for row, column in np.ndindex(ANCHORS.shape):
        anchor = ANCHORS[row, column]
        for k in range(1, min(DRAFTS, LENGTH - 1 - anchor) + 1):
            weight, q = np.exp(-(k - 1) / 2.0), log_q[row, column, k - 1]
            p = log_p[row, anchor + k - 1]
            one = -q[made.ids[row, anchor + k]] if loss == "ce" else (np.exp(p) * (p - q)).sum()
            wanted += weight * float(WEIGHTS[row, anchor + k]) * one
            divisor += weight
    np.testing.assert_allclose(total, wanted / divisor, rtol=1e-5)


@pytest.mark.parametrize("anchor", [1, 6, 12])
def test_a_chain_depends_on_what_stands_before_its_anchor_alone(made, anchor):
    """By gradient, which is exactly zero where nothing is seen. The first row is never joined."""

    def loss(features, rows):
        return loss_of(made, features, rows, np.full((2, 1), anchor, np.int32))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(made.features, made.rows)
    for gradient, first in zip(gradients, (0, 1), strict=True):
        size = np.abs(np.asarray(gradient)).max(axis=-1)
        assert (size[:, :first] == 0.0).all()
        assert (size[:, first:anchor] > 0.0).all()
        assert (size[:, anchor:] == 0.0).all()


def test_what_a_chain_needs_is_asked_for(made):
    plan, params, features = made.plan, made.params, jnp.asarray(made.features)
    with pytest.raises(ValueError, match="is trained on table rows"):
        plan.context_state(params, features, None, None)
    state = plan.context_state(
        params, features, jnp.asarray(made.rows), jnp.asarray(made.positions)
    )
    zero = jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match="packed rows are not supported"):
        plan.block_logits(params, HEADS, state, zero[..., None], zero, zero)


class Run(NamedTuple):
    """A whole run on text prompts: its config, the target's folder, and what was measured."""

    values: dict[str, Any]
    target: Path
    output: Path
    figures: dict[str, Any]
    expected: type


def draft_and_target(kind: str, folder: Path) -> tuple[dict[str, Any], Path, type]:
    if kind == "mtp":
        return {"kind": "mtp", "draft_tokens": 2}, two_layer_target(folder), Qwen35MTP
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    tiny.tiny_qwen35(folder, tied=False, text={"num_hidden_layers": 3, "layer_types": kinds})
    shape = {
        "kind": "eagle3", "draft_tokens": 2, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "target_layer_ids": [1, 2, 0],
    }  # fmt: skip
    return shape, folder, Eagle3


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def run(request, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("train")
    draft, target, expected = draft_and_target(request.param, folder / "target")
    lines = [{"text": f"What is {n}?"} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {
        "target": str(target),
        "output": str(folder / "run"),
        "draft": draft,
        "data": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "held_out": 2},
        "generate": {"batch": 4, "max_tokens": 16},
        "objective": {"anchors": 4, "loss": "kl" if request.param == "eagle3" else "ce"},
        "optimiser": {"steps": 40, "batch": 2, "learning_rate": 3e-3},
        "row_length": 64,
        "eval_prompts": 2,
        "log_every": 10,
        "dtype": "float32",
        "tensorboard": False,
    }
    figures = train(build(TrainConfig, values, ""))
    return Run(values, target, folder / "run", figures, expected)


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = TensorStore(one), TensorStore(other)
    assert first.keys() == second.keys()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_a_run_ends_with_a_draft_that_serves(run):
    """It is read back strictly, and what the exported folder decodes equals plain decoding."""
    assert run.figures["parity"]
    metrics = (run.output / "metrics.csv").read_text().splitlines()
    names = metrics[0].split(",")
    losses = [float(line.split(",")[names.index("loss")]) for line in metrics[1:]]
    assert "accuracy_2" in names
    assert "accuracy_3" not in names
    assert losses[-1] < 0.8 * losses[0]
    target, _ = load_target(run.target, "float32")
    drafter, params = load_drafter(run.output / "draft", target, "float32", draft_tokens=2)
    assert isinstance(drafter, run.expected)
    store = TensorStore(run.output / "draft")
    tensors = export_params(drafter.weight_rules(), params)
    assert {name: x.tobytes() for name, x in tensors.items()} == {
        name: store[name].tobytes() for name in store
    }
    assert read_json(run.output / "draft" / "config.json") == drafter.config.to_hf()
    if isinstance(drafter, Eagle3):
        assert drafter.capture == (1, 2, 0)
        # Nothing of the target's is shipped, and no maps of a whole vocabulary.
        assert not {"embed_tokens.weight", "d2t", "t2d"} & set(store)
    else:
        assert {name[:4] for name in store} == {"mtp."}


def test_a_run_goes_on_and_exports_without_training(run, tmp_path):
    """The same figures when nothing is left to do; the same draft from the checkpoint."""
    again = train(build(TrainConfig, run.values, ""))
    assert again["tau"] == run.figures["tau"]
    assert export_run(run.output, tmp_path / "draft") == 40
    assert_same_tensors(run.output / "draft", tmp_path / "draft")
    with pytest.raises(ConfigError, match="the speculators layout holds DFlash drafts"):
        export_run(run.output, tmp_path / "other", layout="speculators")


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(run, tmp_path, monkeypatch):
    """The exported drafts are the same byte for byte."""
    values = {**run.values, "output": str(tmp_path / "run"), "eval_prompts": 0}
    (tmp_path / "run").mkdir()
    shutil.copy(run.output / "answers.jsonl", tmp_path / "run")
    to_devices, made = loop.to_devices, iter(range(1, 100))

    def stop_at_20(batch, mesh):
        if next(made) == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return to_devices(batch, mesh)

    monkeypatch.setattr(loop, "to_devices", stop_at_20)
    with pytest.raises(Stopped, match="after step 20, which is saved"):
        train(build(TrainConfig, values, ""))
    train(build(TrainConfig, values, ""))
    assert_same_tensors(run.output / "draft", tmp_path / "run" / "draft")


def test_targets_that_a_draft_is_not_for_are_refused(run, tmp_path):
    encoder: Any = None
    if run.expected is Qwen35MTP:
        tiny_gemma4(tmp_path / "gemma")
        target, _ = load_target(tmp_path / "gemma", "float32")
        shape = build(TrainConfig, run.values, "").draft
        with pytest.raises(ConfigError, match=r"draft.kind is 'mtp', but .*Gemma4"):
            new_drafter(shape, tmp_path / "gemma", target, encoder)
        return
    target, _ = load_target(run.target, "float32")
    draft = {name: value for name, value in run.values["draft"].items() if name[:6] != "target"}
    shape = build(TrainConfig, {**run.values, "draft": draft}, "").draft
    with pytest.raises(ConfigError, match=r"draft.target_layer_ids .* a target of 3 layers"):
        new_drafter(shape, run.target, target, encoder)
