"""From answers to weights beside a run, on a tiny target: files, kills, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from mmflash_jax.config_drafts import DraftShape
from mmflash_jax.config_train import ChartData, GenerateConfig, TrainConfig, VisualConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target
from mmflash_jax.training import answers as answers_module
from mmflash_jax.training.answers import answers_of, answers_path
from mmflash_jax.training.data import collate, make_row
from mmflash_jax.training.visual_kl import visual_path, visual_scores, visual_weights
from mmflash_jax.weights.hf_config import ConfigError
from tests import tiny
from tests.drafts import two_layer_target

SHAPE = DraftShape(
    num_hidden_layers=1, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, mask_token="<|video_pad|>",
)  # fmt: skip
TEXT_ONLY = 2


class Setup(NamedTuple):
    plan: Plan
    params: Any
    encoder: PromptEncoder
    requests: list[Request]
    prompts: list[Prompt]
    answers: list[tuple[int, ...]]
    folder: Path


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Seven prompts: the third is text alone, the fifth has a grey picture, the sixth has two."""
    folder = two_layer_target(tmp_path_factory.mktemp("target"))
    target, params = load_target(folder, "float32")
    encoder = PromptEncoder.from_checkpoint(folder, target)
    random = np.random.default_rng(0)
    noise = [Image.fromarray(random.integers(0, 255, (64, 80, 3), np.uint8)) for _ in range(8)]
    grey = Image.new("RGB", (64, 80), (127, 127, 127))
    pictures = [noise[:1], noise[1:2], [], noise[2:3], [grey], noise[3:5], noise[5:6]]
    requests = [
        Request(id=str(n), text=f"Number {n}?", images=images, max_tokens=12)
        for n, images in enumerate(pictures)
    ]
    prompts = [encoder.encode(request) for request in requests]
    answers = [tuple(random.integers(0, 256, 6 + n % 4).tolist()) for n in range(len(prompts))]
    return Setup(Plan(target, NoDraft(), ()), params, encoder, requests, prompts, answers, folder)


def run_config(setup: Setup, output: Path, **visual: Any) -> TrainConfig:
    """A run in `output`, whose answers lie there."""
    config = TrainConfig(
        target=str(setup.folder), output=output, draft=SHAPE, data=ChartData(count=7),
        generate=GenerateConfig(batch=3, max_tokens=12), row_length=96, dtype="float32",
        visual=VisualConfig(**{"batch": 2, **visual}),
    )  # fmt: skip
    output.mkdir(exist_ok=True)
    if not answers_path(config).exists():
        answers_path(config).write_text("answers\n")
    return config


def weights(setup: Setup, config: TrainConfig, **changes: Any) -> Any:
    made = setup._replace(**changes)
    return visual_weights(
        made.plan, made.params, made.requests, made.prompts, made.answers, made.encoder, config
    )


@pytest.fixture(scope="module")
def scored(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Any]:
    config = run_config(setup, tmp_path_factory.mktemp("run"))
    return config, weights(setup, config)


def test_no_settings_no_second_pass(setup, tmp_path):
    config = dataclasses.replace(run_config(setup, tmp_path), visual=None)
    assert weights(setup, config) is None
    assert not visual_path(config).exists()


def test_every_answer_token_has_a_weight(setup, scored):
    """Checks (a) and (c): grey pictures and text weigh 1, the others 1 on average."""
    _, made = scored
    for number, (sample, answer) in enumerate(zip(made, setup.answers, strict=True)):
        assert sample.weight.shape == sample.score.shape == (len(answer),)
        assert sample.weight.dtype == sample.score.dtype == np.float32
        assert sample.weight.mean() == pytest.approx(1, abs=1e-4)
        if number == TEXT_ONLY:
            assert np.isnan(sample.score).all()
            assert (sample.weight == 1).all()
        elif number == 4:
            assert (sample.score < 1e-4).all()
            assert (sample.weight == 1).all()
        else:
            assert sample.score.max() > 1e-3
            assert len(np.unique(sample.weight)) > 2


def test_strength_zero_is_plain(setup, scored):
    """Check (b), from the same stored scores."""
    config, made = scored
    assert config.visual is not None
    plain = dataclasses.replace(config, visual=dataclasses.replace(config.visual, strength=0.0))
    before = visual_path(config).read_bytes()
    for one, other in zip(weights(setup, plain), made, strict=True):
        assert (one.weight == 1).all()
        np.testing.assert_array_equal(one.score, other.score)
    assert visual_path(config).read_bytes() == before


def test_weights_reach_rows_and_batches(setup, scored):
    media = np.zeros((0, 4), np.float32)
    _, made = scored
    parts = list(zip(setup.prompts, setup.answers, made, strict=True))[:3]
    rows = [make_row(prompt, media, ids, 96, visual) for prompt, ids, visual in parts]
    for row, (prompt, _, visual) in zip(rows, parts, strict=True):
        assert row is not None
        start = len(prompt.ids)
        assert row.weight.shape == row.score.shape == row.ids.shape
        np.testing.assert_array_equal(row.weight[start:], visual.weight)
        np.testing.assert_array_equal(row.score[start:], visual.score)
        assert np.isnan(row.score[:start]).all()
    batch = collate([row for row in rows if row is not None], 96)["weight"]
    assert batch.shape == (3, 96)
    assert batch.dtype == np.float32
    assert rows[0] is not None
    np.testing.assert_array_equal(batch[0, : len(rows[0].ids)], rows[0].weight)
    assert (batch[0, len(rows[0].ids) :] == 0).all()
    plain = make_row(setup.prompts[0], media, setup.answers[0], 96)
    assert plain is not None
    assert (plain.weight == 1).all()


def test_the_mean_is_one_over_what_fits_a_row(setup, scored):
    config, _ = scored
    short = dataclasses.replace(config, row_length=len(setup.prompts[1].ids) + 5)
    short = dataclasses.replace(short, objective=dataclasses.replace(short.objective, anchors=2))
    sample = weights(setup, short)[1]
    row = make_row(setup.prompts[1], np.zeros((0, 4)), setup.answers[1], short.row_length, sample)
    assert row is not None
    assert row.weight[row.prompt_len + 1 :].mean() == pytest.approx(1, abs=1e-4)


def test_image_placeholders_in_an_answer_are_never_labels(setup, tmp_path):
    """Check (i), with and without a picture."""
    answers = [(*ids[:2], tiny.IMAGE_PAD_ID, *ids[3:]) for ids in setup.answers]
    for sample in weights(setup, run_config(setup, tmp_path), answers=answers):
        assert sample.weight[2] == 0
        assert np.delete(sample.weight, 2).mean() == pytest.approx(1, abs=1e-4)


def test_an_unrelated_text_sample_changes_nothing(setup, scored, tmp_path):
    """Check (f), bit for bit."""
    order = [0, 1, 3, TEXT_ONLY, 4, TEXT_ONLY, 5, 6]
    changes = {
        name: [getattr(setup, name)[n] for n in order]
        for name in ("requests", "prompts", "answers")
    }
    made = weights(setup, run_config(setup, tmp_path), **changes)
    for number, sample in zip(order, made, strict=True):
        np.testing.assert_array_equal(sample.weight, scored[1][number].weight)
        np.testing.assert_array_equal(sample.score, scored[1][number].score)


def test_the_file_holds_a_number_a_token_and_every_setting(setup, scored):
    config, made = scored
    header, *lines = [json.loads(line) for line in visual_path(config).read_text().splitlines()]
    assert set(header) == {
        "target", "target_revision", "dtype", "chat_template", "image_processor", "ablation",
        "ablation_parameters", "seed", "estimator", "cap", "temperature", "vocabulary", "answers",
    }  # fmt: skip
    assert header["vocabulary"] == 265, "the head has more rows than the tokenizer ids"
    assert header["estimator"] == "full"
    assert lines[TEXT_ONLY] is None
    for line, sample, answer in zip(lines, made, setup.answers, strict=True):
        if line is not None:
            assert len(line["score"]) == len(line["confidence"]) == len(answer)
            np.testing.assert_array_equal(np.array(line["score"], np.float32), sample.score)


def test_a_killed_run_ends_with_the_same_file(setup, scored, tmp_path):
    config, _ = scored
    whole = visual_path(config).read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    again = run_config(setup, tmp_path)
    # In the header, at its end, inside the first batch, after it, after the text, near the end.
    for size in (40, ends[0] + 1, ends[1] + 9, ends[2] + 1, ends[3] + 30, len(whole) - 1):
        visual_path(again).write_bytes(whole[:size])
        weights(setup, again)
        assert visual_path(again).read_bytes() == whole, f"killed after {size} bytes"


def test_stored_scores_are_not_made_again(setup, scored, monkeypatch):
    config, made = scored
    monkeypatch.setattr("mmflash_jax.training.visual_kl.score_answers", None)
    for one, other in zip(weights(setup, config), made, strict=True):
        np.testing.assert_array_equal(one.weight, other.weight)


REFUSALS = {
    "ablation": ({"ablation": "noise"}, "ablation is 'blank' there and 'noise' in the config"),
    "seed": ({"seed": 3}, "seed is 0 there and 3 in"),
    "cap": ({"cap": 5.0}, r"cap is 10\.0 there and 5\.0 in"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_scores_of_other_settings_are_refused(setup, scored, tmp_path, change, message):
    config = run_config(setup, tmp_path, **change)
    visual_path(config).write_bytes(visual_path(scored[0]).read_bytes())
    with pytest.raises(ConfigError, match=message):
        weights(setup, config)


def test_scores_of_other_answers_dtypes_and_front_ends_are_refused(setup, scored, tmp_path):
    config = run_config(setup, tmp_path)
    visual_path(config).write_bytes(visual_path(scored[0]).read_bytes())
    answers_path(config).write_text("other answers\n")
    with pytest.raises(ConfigError, match="answers is '"):
        weights(setup, config)
    answers_path(config).write_text("answers\n")
    narrow: Any = dataclasses.replace(setup.plan.target, dtype="bfloat16")  # pyright: ignore
    with pytest.raises(ConfigError, match="dtype is 'float32' there and 'bfloat16' in"):
        weights(setup, config, plan=Plan(narrow, NoDraft(), ()))
    for name, field in (
        ("chat_template.jinja", "chat_template"), ("preprocessor_config.json", "image_processor"),
        ("model.safetensors", "target_revision"),
    ):  # fmt: skip
        file = setup.folder / name
        before = file.read_bytes()
        try:
            end = b" " if name != "preprocessor_config.json" else b""
            file.write_bytes(before.replace(b'"patch_size": 16', b'"patch_size": 14') + end)
            with pytest.raises(ConfigError, match=f"{field} is '"):
                weights(setup, config)
        finally:
            file.write_bytes(before)


def test_scores_of_answers_of_another_length_are_refused(setup, scored):
    answers = [*setup.answers[:3], (*setup.answers[3], 5), *setup.answers[4:]]
    with pytest.raises(ConfigError, match="number of scores of answer 4 is 9 there and 10"):
        weights(setup, scored[0], answers=answers)


@pytest.mark.parametrize("ablation", ["patchmask", "pixelate", "noise", "textonly"])
def test_every_ablation_scores(setup, tmp_path, ablation):
    config = run_config(setup, tmp_path, ablation=ablation)
    made = visual_scores(
        setup.plan, setup.params, setup.requests, setup.prompts, setup.answers, setup.encoder,
        config,
    )  # fmt: skip
    assert [scores is None for scores in made] == [n == TEXT_ONLY for n in range(7)]
    for number, scores in enumerate(made):
        if scores is not None:
            assert np.isfinite(scores).all()
            # A grey picture is as grey with fewer pixels.
            assert scores[0].max() > 1e-4 or (number == 4 and ablation == "pixelate")


def test_killed_answering_goes_on_at_its_batch(setup, tmp_path, monkeypatch):
    """The file of answers is written while they are made, and ends the same."""
    config = run_config(setup, tmp_path)
    answers_path(config).unlink()
    made = answers_of(setup.plan, setup.params, setup.prompts, config)
    whole = answers_path(config).read_bytes()
    assert [len(json.loads(line)) for line in whole.splitlines()[1:]] == [12] * 7
    header = json.loads(whole.splitlines()[0])
    assert {"dtype", "target_revision", "chat_template", "image_processor"} <= set(header)
    starts: list[int] = []

    def answer(*args: Any, start: int, **options: Any) -> Any:
        starts.append(start)
        return real_answer(*args, start=start, **options)

    real_answer = answers_module.answer
    monkeypatch.setattr(answers_module, "answer", answer)
    lines = whole.splitlines(keepends=True)
    for kept in (0, 1, 3, 4, 6, 7):
        rest = lines[kept + 1][:4] if kept < 7 else b""
        answers_path(config).write_bytes(b"".join(lines[: kept + 1]) + rest)
        assert answers_of(setup.plan, setup.params, setup.prompts, config) == made
        assert answers_path(config).read_bytes() == whole
    assert starts == [0, 0, 3, 3, 6]
