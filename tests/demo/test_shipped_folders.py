"""What every shipped target folder holds, and the figures that its training reached."""

import json
from pathlib import Path

import pytest

from mmflash_jax.registry import DEMO

TARGETS = {"qwen35": "qwen35-mmflash", "gemma4": "gemma4-mmflash"}


@pytest.fixture(params=TARGETS)
def folder(request) -> Path:
    return DEMO / request.param


def test_the_folder_is_complete_and_small(folder):
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(sizes.values()) < 10_000_000
    assert set(sizes) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_log.json",
    }


def test_target_and_draft_take_less_than_sixteen_mebibytes(folder):
    files = [*folder.iterdir(), *(DEMO / TARGETS[folder.name]).iterdir()]
    assert sum(path.stat().st_size for path in files) < 16 * 2**20


def test_the_training_log_records_the_figures_that_were_required(folder):
    figures = json.loads((folder / "training_log.json").read_text())["figures"]
    for result in figures["accuracy"]:
        if result["picture"] == "image":
            assert result["accuracy"] >= 0.95
        else:
            assert result["accuracy"] <= 0.20
    for result in figures["unsure_tokens"]:
        assert result["all"]["unsure"] >= 0.10
