"""A draft trained from a YAML file to a folder that other programs load, on a tiny target."""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import train
from mmflash_jax.config import ServeConfig
from mmflash_jax.drafters import Heads
from mmflash_jax.evaluation.batch import run
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.weights import TensorStore
from pallas_kernels import product
from tests import tiny
from tests.drafts import two_layer_target
from tests.tolerances import MODEL, assert_close

STEPS = 40


class Trained(NamedTuple):
    folder: Path
    config: dict[str, Any]
    output: Path


def call(config: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmflash_jax.compilation.keep_compiled_programs", lambda: None)
        patch.setattr(sys, "argv", ["train.py", "--config", str(config)])
        return train.main()


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / f"{Path(config['output']).name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Trained:
    """One run: text and pictures, a sliding and a full layer, answers of the target's own.

    One of the four held-out prompts has a picture.
    """
    folder = tmp_path_factory.mktemp("train")
    random = np.random.default_rng(0)
    lines: list[dict[str, Any]] = [{"text": f"What is {n}?"} for n in range(12)]
    for n in (2, 5, 11):
        Image.fromarray(random.integers(0, 255, (64, 80, 3), np.uint8)).save(folder / f"{n}.png")
        lines[n]["images"] = [f"{n}.png"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "target": str(target_folder),
        "output": str(folder / "run"),
        "draft": {
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mask_token": "<|video_pad|>",
            "target_layer_ids": [0, 1],
            "block_size": 8,
            "rope_theta": 1e4,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 12,
        },
        "data": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "held_out": 4},
        "generate": {"batch": 4, "max_tokens": 16},
        "objective": {"anchors": 6, "decay": 4.0},
        "optimiser": {"steps": STEPS, "batch": 4, "learning_rate": 3e-3},
        "row_length": 64,
        "eval_prompts": 4,
        "log_every": 10,
        "save_every": 25,
        "dtype": "float32",
    }
    assert call(write_config(folder, config)) == 0
    return Trained(folder, config, folder / "run")


def metrics(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_the_loss_falls_and_is_written(trained):
    rows = metrics(trained.output)
    slots = [f"accuracy_{slot}" for slot in range(1, 8)]
    names = ["step", "loss", "accuracy", "kept", "grad_norm", *slots, "seconds"]
    assert list(rows[0]) == names
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40]
    losses = [float(row["loss"]) for row in rows]
    assert all(np.isfinite(losses))
    assert losses[-1] < 0.8 * losses[0]
    assert float(rows[-1]["accuracy"]) > float(rows[0]["accuracy"])


def test_the_run_is_evaluated_by_the_loop_that_serves(trained):
    figures = json.loads((trained.output / "evaluation.json").read_text())
    assert figures["parity"] is True
    assert figures["prompts"] == figures["rows_equal"] == 4
    assert figures["tau"] == pytest.approx(1 + sum(figures["accepted_per_position"]))
    assert len(figures["accepted_per_position"]) == 7
    assert figures["tokens_per_s"] > 0
    assert figures["plain_tokens_per_s"] > 0


def test_features_on_disk_train_the_same_draft(trained):
    """Answers, pictures and all: the losses of the online run."""
    disk = {**trained.config, "output": str(trained.folder / "disk"), "eval_prompts": 0}
    disk["features"] = "disk"
    output = Path(disk["output"])
    output.mkdir()
    os.link(trained.output / "answers.jsonl", output / "answers.jsonl")
    assert call(write_config(trained.folder, disk)) == 0
    header, *rows = (output / "features.jsonl").read_text().splitlines()
    assert len(rows) == len(list((output / "features").iterdir())) == 8
    assert json.loads(header)["target_layer_ids"] == [0, 1]
    made, wanted = (
        [float(row["loss"]) for row in metrics(path)] for path in (output, trained.output)
    )
    np.testing.assert_allclose(made, wanted, rtol=1e-5)


def test_the_evaluation_knows_how_visual_tokens_are(trained):
    figures = json.loads((trained.output / "evaluation.json").read_text())
    buckets = figures["visual_buckets"]
    # The picture's answer alone is scored, and all of it but the token of prefill.
    assert sum(buckets[name]["share"] for name in ("top", "middle", "zero")) == pytest.approx(1)
    steps = sum(buckets[name]["steps"] for name in ("top", "middle", "zero"))
    assert 0 < steps <= 15
    assert set(figures["tau_by_visual_bucket"]) == {"top", "middle", "zero"}
    for name in ("training", "positions", "visual_buckets"):
        with Image.open(trained.output / f"{name}.png") as picture:
            assert min(picture.size) > 300


def test_evaluation_and_the_batch_tool_agree(trained, tmp_path, target_folder):
    """D15: the folder, read back and served, accepts as many drafts as the trainer said."""
    lines = (trained.folder / "prompts.jsonl").read_text().splitlines()[-4:]
    prompts = tmp_path / "prompts.jsonl"
    for file in trained.folder.glob("*.png"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    prompts.write_text("\n".join(lines))
    report = tmp_path / "report.json"
    code = run(
        ServeConfig(
            target=str(target_folder), draft=str(trained.output / "draft"), prompts=prompts,
            report=report, max_tokens=16,
        )
    )  # fmt: skip
    assert code == 0
    figures = json.loads(report.read_text())
    evaluation = json.loads((trained.output / "evaluation.json").read_text())
    assert figures["tau"] == evaluation["tau"], "the trainer evaluates what it ships"


def test_the_same_seed_gives_the_same_run_and_answers_are_reused(trained, caplog):
    # D09: evaluations on the way change nothing.
    again = {**trained.config, "output": str(trained.folder / "again"), "eval_every": 15}
    output = Path(again["output"])
    output.mkdir()
    answers = (trained.output / "answers.jsonl").read_bytes()
    (output / "answers.jsonl").write_bytes(answers)
    with caplog.at_level("INFO"):
        assert call(write_config(trained.folder, again)) == 0
    assert "8 answers read from" in caplog.text
    assert (output / "answers.jsonl").read_bytes() == answers

    def figures(path: Path) -> list[dict[str, str]]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in metrics(path)]

    assert figures(output) == figures(trained.output)
    on_the_way = [json.loads((output / f"evaluations/{n}.json").read_text()) for n in (15, 30)]
    assert [evaluation["parity"] for evaluation in on_the_way] == [True, True]
    assert sorted(path.name for path in (output / "evaluations").iterdir()) == [
        "15.json",
        "30.json",
    ]
    weights = "draft/model.safetensors"
    assert (output / weights).read_bytes() == (trained.output / weights).read_bytes()


def test_answers_are_the_targets_own(trained):
    header, *rows = (trained.output / "answers.jsonl").read_text().splitlines()
    assert json.loads(header)["sampling"] == "greedy"
    answers = [json.loads(row) for row in rows]
    assert len(answers) == 8, "held-out prompts are not answered"
    assert all(1 <= len(ids) <= 16 for ids in answers)
    assert len({id for ids in answers for id in ids}) > 20, (
        "answers of one token would teach nothing"
    )
    assert not (trained.output / "answers.tmp").exists()


CHANGES = {
    "generate": ({"generate": {"batch": 4, "max_tokens": 15}}, "max_tokens is 16 there and 15 in"),
    "data": ({"data": {"held_out": 2}}, "data is "),
    "target": ({"target": "demo"}, "target is "),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_answers_of_other_settings_are_refused(trained, tmp_path, capsys, change, message):
    config = {**trained.config, "output": str(tmp_path / "other"), **change}
    config["data"] = {**trained.config["data"], **change.get("data", {})}
    if change.get("target"):
        config["draft"] = {**config["draft"], "mask_token": "<|mask|>"}
    answers = (trained.output / "answers.jsonl").read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "answers.jsonl").write_bytes(answers)
    assert call(write_config(tmp_path, config)) == 2
    error = capsys.readouterr().err
    assert "answers.jsonl was made with other settings: " in error
    assert message in error
    assert (tmp_path / "other" / "answers.jsonl").read_bytes() == answers


def test_answers_to_other_prompts_in_the_same_file_are_refused(trained, tmp_path, capsys):
    prompts = trained.folder / "prompts.jsonl"
    before = prompts.read_text()
    try:
        prompts.write_text(before.replace("What is 1?", "Why is 1?"))
        config = {**trained.config, "output": str(trained.output)}
        assert call(write_config(tmp_path, config)) == 2
    finally:
        prompts.write_text(before)
    assert "was made with other settings: data is " in capsys.readouterr().err


def test_the_export_holds_exactly_the_drafts_own_tensors(trained, target_folder):
    """D05, D06: no embedding, no head; no rotary key of the target."""
    layer = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    layer += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"layers.{n}.{name}" for n in range(2) for name in layer}
    store = TensorStore(trained.output / "draft")
    assert set(store) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert {str(store[name].dtype) for name in store} == {"bfloat16"}
    text = (trained.output / "draft" / "config.json").read_text()
    for foreign in ("partial_rotary_factor", "mrope", "rope_parameters"):
        assert foreign not in text
        assert foreign in (target_folder / "config.json").read_text() or foreign == "mrope"
    config = json.loads(text)
    assert config["dflash_config"]["mask_token_id"] == tiny.TOKEN_IDS["<|video_pad|>"]
    assert config["sliding_window"] == 12
    assert config["rope_theta"] == 1e4


def test_z_labs_package_loads_the_export_and_drafts_alike(trained, target_folder):
    # Here, since without that package the import skips what imports it.
    from tests.drafters import zlab

    folder = trained.output / "draft"
    model, info = zlab.dflash.DFlashDraftModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.config.rope_parameters["rope_theta"] == 1e4
    target, target_params = load_target(target_folder, "float32")
    drafter, params = load_drafter(folder, target, "float32")
    random = np.random.default_rng(0)
    features = random.standard_normal((29, 2 * 64), np.float32)
    ids = np.full(8, drafter.config.mask_token_id)
    ids[0] = 65
    table, head = (
        np.array(target_params[name]["embedding"]) for name in ("embed_tokens", "lm_head")
    )
    wanted = zlab.logits(model.eval(), features, ids, table, head)
    heads = Heads(
        embed=lambda ids: target.embed_raw(target_params, ids),
        logits=lambda hidden: product.logits(hidden, target.head(target_params)),
    )

    @jax.jit
    def draft(params, features, ids):
        state = drafter.context_state(params, features)
        start = jax.numpy.full((1, 1), features.shape[1])
        hidden = drafter.denoise(params, state, ids, start, heads)
        return drafter.logits(hidden[0, 0], heads)

    made = draft(params, features[None], ids[None, None].astype(np.int32))
    assert_close(made, wanted, MODEL)


MISTAKES = {
    "field": ({"optimizer": {}}, "unknown fields ['optimizer']"),
    "target": ({"target": "none/such"}, "'none/such' is no short name"),
    "prompts": ({"data": {"kind": "jsonl", "path": "none.jsonl"}}, "none.jsonl"),
    "held out": ({"data": {"held_out": 12}}, "held_out is 12, but"),
    "layers": ({"draft": {"target_layer_ids": [0, 9]}}, "target_layer_ids: draft [9]"),
    "mask": ({"draft": {"mask_token": "<none>"}}, "no token '<none>'"),
    "batch": (
        {"optimiser": {"batch": 9}, "answers": True},
        "8 training rows do not fill the 9 rows of a step",
    ),
    "short rows": ({"row_length": 8, "answers": True}, "0 training rows do not fill"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_run_that_cannot_be_gives_one_message(trained, tmp_path, capsys, change, message):
    config = {**trained.config, "output": str(tmp_path / "other")}
    for name, value in change.items():
        old = config.get(name)
        config[name] = {**old, **value} if isinstance(old, dict) else value
    if config.pop("answers", False):
        (tmp_path / "other").mkdir()
        os.link(trained.output / "answers.jsonl", tmp_path / "other" / "answers.jsonl")
    assert call(write_config(tmp_path, config)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "other" / "draft").exists()
