"""Folders to plans and parameters: what cannot be loaded is named."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest

from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.load import default_dtype, load_drafter, load_target, warn_of_ordinary_mask
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafts import random_draft


def test_unknown_architectures_are_named_with_the_known_ones(tmp_path, qwen35):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"OPTForCausalLM.*Qwen3_5ForConditionalGeneration"):
        load_target(tmp_path, "float32")
    target, _ = load_target(qwen35.folder, "float32")
    with pytest.raises(ConfigError, match=r"OPTForCausalLM.*DFlashDraftModel"):
        load_drafter(tmp_path, target, "float32")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("{", "is not valid JSON"),
        ("[1]", "holds a list"),
        ("{}", "lacks 'architectures'"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"config.json.*{words}"):
        load_target(tmp_path, "float32")


def test_parameters_come_in_the_asked_dtype(qwen35, tmp_path):
    random_draft(tmp_path, qwen35.folder)
    target, _ = load_target(qwen35.folder, "bfloat16")
    drafter, params = load_drafter(tmp_path, target, "bfloat16")
    assert drafter.dtype == target.dtype == "bfloat16"
    assert {value.dtype for _, value in leaves_with_path(params)} == {jnp.dtype("bfloat16")}


def test_default_dtype_is_narrow_on_accelerators_only():
    cpu = jax.default_backend() == "cpu"
    assert default_dtype() == ("float32" if cpu else "bfloat16")


class Words:
    """As much of a tokenizer as the check reads: five tokens, the last one added."""

    def __init__(self):
        self.added_tokens_decoder = {4: "<mask>"}

    def __len__(self):
        return 5

    def convert_ids_to_tokens(self, token_id):
        return f"token {token_id}"


@pytest.mark.parametrize(("mask", "warns"), [(3, True), (4, False), (9, False)])
def test_a_mask_that_is_an_ordinary_token_is_warned_of(qwen35, tmp_path, caplog, mask, warns):
    """D16: a token of text; an added token or a row past the tokenizer is fine."""
    random_draft(tmp_path, qwen35.folder, mask_token_id=mask)
    target, _ = load_target(qwen35.folder, "float32")
    drafter, _ = load_drafter(tmp_path, target, "float32")
    with caplog.at_level(logging.WARNING):
        warn_of_ordinary_mask(drafter, Words())
    assert bool(caplog.records) == warns
    if warns:
        assert f"mask_token_id {mask}" in caplog.text
