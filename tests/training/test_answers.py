"""Answers of the target to the prompts of a run: sampled, drafted, resumed, refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mmflash_jax.config_files import build
from mmflash_jax.config_train import GenerateConfig, TrainConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import FitError, NoDraft
from mmflash_jax.engine.prompts import PromptEncoder
from mmflash_jax.load import load_target
from mmflash_jax.registry import DEMO
from mmflash_jax.training import answers
from mmflash_jax.training.answers import answers_of, answers_path
from mmflash_jax.training.data import prompt_requests
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafts import random_draft, two_layer_target

SAMPLED = {"batch": 2, "max_tokens": 6, "temperature": 1.0, "seed": 5}
LINES = [{"text": "Hi"}] * 4 + [{"text": "Hi", "temperature": 0.0}]


class Setup(NamedTuple):
    folder: Path
    plan: Plan
    params: Any
    encoder: PromptEncoder

    def config(self, output: Path, **generate: Any) -> TrainConfig:
        output.mkdir(exist_ok=True)
        shape = {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "head_dim": 16, "mask_token_id": 9}  # fmt: skip
        data = {"kind": "jsonl", "path": str(self.folder / "prompts.jsonl"), "held_out": 0}
        values = {"target": str(self.folder / "target"), "output": str(output), "draft": shape,
                  "data": data, "generate": {**SAMPLED, **generate}}  # fmt: skip
        return build(TrainConfig, values, "")

    def prompts(self, generate: GenerateConfig) -> list[Prompt]:
        data = self.config(self.folder).data
        requests, _ = prompt_requests(data, generate.max_tokens, 0, generate.sampling)
        return [self.encoder.encode(request) for request in requests]

    def answer(self, config: TrainConfig) -> list[tuple[int, ...]]:
        return answers_of(self.plan, self.params, self.prompts(config.generate), config)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    target, params = load_target(two_layer_target(folder / "target"), "float32")
    encoder = PromptEncoder.from_checkpoint(folder / "target", target)
    return Setup(folder, Plan(target, NoDraft(), ()), params, encoder)


@pytest.fixture(scope="module")
def sampled(setup: Setup) -> tuple[Path, list[tuple[int, ...]]]:
    config = setup.config(setup.folder / "sampled")
    return answers_path(config), setup.answer(config)


def test_every_row_samples_with_a_seed_of_its_own(setup, sampled, tmp_path):
    """Five times the same prompt; the last line asks for the most likely answer."""
    _, made = sampled
    assert len(set(made)) == 5
    greedy = setup.answer(setup.config(tmp_path / "greedy", temperature=0.0))
    assert set(greedy) == {made[4]}
    other = setup.answer(setup.config(tmp_path / "other", seed=6))
    assert not set(other[:4]) & set(made[:4])


def test_the_header_says_how_they_were_chosen(sampled):
    header = json.loads(sampled[0].read_text().splitlines()[0])
    wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    assert header["sampling"] == wanted
    assert {"target_revision", "chat_template", "image_processor", "dtype"} <= set(header)


@pytest.mark.parametrize("kept", [0, 3])
def test_a_killed_run_samples_on(setup, sampled, tmp_path, kept):
    path, made = sampled
    config = setup.config(tmp_path)
    lines = path.read_bytes().split(b"\n")
    answers_path(config).write_bytes(b"\n".join(lines[: kept + 1]) + b"\n[1")
    assert setup.answer(config) == made
    assert answers_path(config).read_bytes() == path.read_bytes()


def test_a_draft_changes_no_answer(setup, sampled, tmp_path, monkeypatch):
    path, made = sampled
    draft = random_draft(tmp_path / "draft", setup.folder / "target", block_size=4)
    config = setup.config(tmp_path / "run", draft=str(draft))
    used, run = [], answers.answer

    def watched(plan: Plan, *given: Any, **more: Any) -> Any:
        used.append(plan.drafter.block)
        return run(plan, *given, **more)

    monkeypatch.setattr(answers, "answer", watched)
    assert setup.answer(config) == made
    assert used == [4]
    assert answers_path(config).read_bytes() == path.read_bytes()


def test_a_draft_of_another_target_is_refused(setup, tmp_path):
    config = setup.config(tmp_path, draft=str(DEMO / "qwen35-mmflash"))
    with pytest.raises(FitError, match="hidden_size: draft 192, target 64"):
        setup.answer(config)


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"seed": 6}, {"min_p": 0.1}])
def test_answers_sampled_otherwise_are_refused(setup, sampled, tmp_path, change):
    path, _ = sampled
    config = setup.config(tmp_path, **change)
    answers_path(config).write_bytes(path.read_bytes())
    there = dataclasses.asdict(GenerateConfig(**SAMPLED).sampling)
    with pytest.raises(ConfigError) as error:
        setup.answer(config)
    assert f"sampling is {there} there and {there | change} in the config" in str(error.value)
    assert answers_path(config).read_bytes() == path.read_bytes()
