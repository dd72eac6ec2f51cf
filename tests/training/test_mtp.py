"""Training of an MTP head: what it learns from is what it sees when it serves."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import ObjectiveConfig, TrainConfig
from mmflash_jax.config_files import build
from mmflash_jax.drafters import Anchor, Context, Heads, Qwen35MTP
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.training.export import export_run
from mmflash_jax.training.objective import block_loss
from mmflash_jax.training.trainer import new_drafter, train
from mmflash_jax.weights import TensorStore
from mmflash_jax.weights.hf_config import ConfigError
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


def logits_of(hidden):
    return jnp.einsum("...d,vd->...v", hidden, HEAD, precision=jax.lax.Precision.HIGHEST)


@pytest.fixture(scope="module")
def made():
    """Plan, parameters, and rows of hidden states, ids, table rows and rotary positions."""
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    }  # fmt: skip
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }  # fmt: skip
    plan = Qwen35MTP.from_hf({"text_config": text}, "float32")
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB_SIZE, (2, LENGTH)).astype(np.int32)
    features = rng.standard_normal((2, LENGTH, WIDTH), np.float32)
    rows = TABLE[ids] + (np.arange(LENGTH) < TEXT)[:, None]
    positions = np.sort(rng.integers(0, 9, (3, 2, LENGTH)), axis=-1).astype(np.int32)
    positions[..., TEXT:] = 12 + np.arange(LENGTH - TEXT)
    return plan, random_params(plan), features, ids, rows.astype(np.float32), positions


def trained(made, features, anchors, recorded=None):
    plan, params, _, ids, rows, positions = made

    def logits(hidden):
        if recorded is not None:
            recorded.append(logits_of(hidden))
        return logits_of(hidden)

    heads = Heads(embed=lambda ids: jnp.asarray(TABLE)[ids], logits=logits)
    return block_loss(
        plan, params, heads, jnp.asarray(features), jnp.asarray(ids), jnp.full(2, LENGTH),
        jnp.asarray(anchors), jnp.ones(anchors.shape, bool), ObjectiveConfig(),
        rows=jnp.asarray(rows), positions=jnp.asarray(positions),
    )[0]  # fmt: skip


def test_training_logits_are_those_of_serving(made):
    """A chain that drafts the right tokens after absorbing what stands before its anchor."""
    plan, params, features, ids, rows, positions = made
    got: list[Any] = []
    trained(made, features, ANCHORS, got)
    for column in range(ANCHORS.shape[1]):
        length = ANCHORS[:, column]
        context = Context(
            features=jnp.asarray(features), rows=jnp.asarray(rows),
            positions=jnp.asarray(positions), length=jnp.zeros(2, jnp.int32),
            count=jnp.asarray(length),
        )  # fmt: skip
        state = plan.absorb(params, plan.init_state(2, LENGTH), context)
        seen: list[Any] = []

        def pick(logits, first=0, length=length, seen=seen):
            seen.append(np.asarray(logits)[:, 0])
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
                assert_close(got[0][row, column, step], wanted, 3 * LAYER, f"{length} {step}")


@pytest.mark.parametrize("anchor", [1, 6, 12])
def test_a_chain_depends_on_hidden_states_before_its_anchor_alone(made, anchor):
    """By gradient, which is exactly zero where nothing is seen."""
    gradient = jax.grad(lambda x: trained(made, x, np.full((2, 1), anchor, np.int32)))(made[2])
    size = np.abs(np.asarray(gradient)).max(axis=-1)
    assert (size[:, anchor:] == 0.0).all()
    assert (size[:, :anchor] > 0.0).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run on text prompts, and its config."""
    folder = tmp_path_factory.mktemp("train")
    target = two_layer_target(folder / "target")
    lines = [{"text": f"What is {n}?"} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {
        "target": str(target),
        "output": str(folder / "run"),
        "draft": {"kind": "mtp", "draft_tokens": 2},
        "data": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "held_out": 2},
        "generate": {"batch": 4, "max_tokens": 16},
        "objective": {"anchors": 4},
        "optimiser": {"steps": 40, "batch": 2, "learning_rate": 3e-3},
        "row_length": 64,
        "eval_prompts": 2,
        "log_every": 10,
        "dtype": "float32",
        "tensorboard": False,
    }
    return values, target, train(build(TrainConfig, values, ""))


def test_a_run_ends_with_a_head_that_serves(run):
    _, target_folder, figures = run
    assert figures["parity"]
    metrics = (target_folder.parent / "run" / "metrics.csv").read_text().splitlines()
    names = metrics[0].split(",")
    losses = [float(line.split(",")[names.index("loss")]) for line in metrics[1:]]
    assert "accuracy_2" in names
    assert "accuracy_3" not in names
    assert losses[-1] < 0.8 * losses[0]
    target, _ = load_target(target_folder, "float32")
    draft = target_folder.parent / "run" / "draft"
    drafter, _ = load_drafter(draft, target, "float32", draft_tokens=2)
    assert isinstance(drafter, Qwen35MTP)
    assert {name[:4] for name in TensorStore(draft)} == {"mtp."}


def test_a_run_goes_on_and_exports_without_training(run, tmp_path):
    """The same figures when nothing is left to do; the same draft from the checkpoint."""
    values, target_folder, figures = run
    again = train(build(TrainConfig, values, ""))
    assert again["tau"] == figures["tau"]
    output = target_folder.parent / "run"
    assert export_run(output, tmp_path / "draft") == 40
    one, two = TensorStore(output / "draft"), TensorStore(tmp_path / "draft")
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    with pytest.raises(ConfigError, match="the speculators layout holds DFlash drafts"):
        export_run(output, tmp_path / "other", layout="speculators")


def test_a_target_of_another_family_is_refused(run, tmp_path):
    values, *_ = run
    tiny_gemma4(tmp_path / "gemma")
    target, _ = load_target(tmp_path / "gemma", "float32")
    shape = build(TrainConfig, values, "").draft
    encoder: Any = None
    with pytest.raises(ConfigError, match=r"draft.kind is 'mtp', but .*Gemma4"):
        new_drafter(shape, tmp_path / "gemma", target, encoder)
