"""Reading of a Qwen3.5 `config.json`: nothing assumed, contradictions refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.load import load_target, stop_ids
from mmflash_jax.targets.qwen3_5 import Qwen35
from mmflash_jax.weights import TensorStore, WeightsError, write_checkpoint
from mmflash_jax.weights.hf_config import ConfigError


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def change(config, **fields):
    """A copy with fields of `text_config` changed; None takes a field away."""
    text = {k: v for k, v in (config["text_config"] | fields).items() if v is not None}
    return config | {"text_config": text}


def rope(config, **fields):
    return change(config, rope_parameters=config["text_config"]["rope_parameters"] | fields)


def test_every_size_comes_from_the_file(any_qwen):
    text = read_config(any_qwen.folder)["text_config"]
    config = any_qwen.target.config
    for name in ("hidden_size", "head_dim", "linear_num_value_heads", "vocab_size"):
        assert getattr(config, name) == text[name]
    assert list(config.layer_types) == text["layer_types"]
    assert config.rope_theta == text["rope_parameters"]["rope_theta"]


def test_layer_types_may_be_given_by_their_interval(qwen):
    config = read_config(qwen.folder)
    short = change(config, layer_types=None, full_attention_interval=4)
    assert Qwen35.from_hf(short, "float32") == qwen.target


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda c: change(c, head_dim=None), ["head_dim"]),
        (lambda c: change(c, hidden_act="gelu"), ["hidden_act", "gelu"]),
        (lambda c: change(c, attention_bias=True), ["attention_bias"]),
        (lambda c: change(c, num_hidden_layers=7), ["layer_types", "4", "7"]),
        (lambda c: change(c, layer_types=["linear_attention", "x"] * 2), ["layer_types", "'x'"]),
        (lambda c: rope(c, mrope_section=[4, 3, 2]), ["mrope_section", "[4, 3, 2]", "8"]),
        (lambda c: rope(c, mrope_interleaved=False), ["mrope_interleaved"]),
        (lambda c: rope(c, rope_type="yarn"), ["rope_type", "yarn"]),
        # D04: the base in two places that disagree, and nowhere.
        (lambda c: change(c, rope_theta=5.0), ["rope_theta", "5.0", "10000000.0"]),
        (lambda c: rope(c, rope_theta=None), ["rope_theta"]),
        (lambda c: {k: v for k, v in c.items() if k != "image_token_id"}, ["image_token_id"]),
    ],
)
def test_config_refuses_what_it_cannot_do(qwen, made, names):
    with pytest.raises(ConfigError) as error:
        Qwen35.from_hf(made(read_config(qwen.folder)), "float32")
    assert all(name in str(error.value) for name in names), error.value


def test_bfloat16_keeps_the_decay_and_the_gated_norm_wide(qwen):
    """Checkpoints store them in fp32; rounding them shifts every step's decay."""
    wide = {"A_log", "dt_bias", "linear_attn.norm.weight"}
    _, params = load_target(qwen.folder, "bfloat16")
    for path, value in leaves_with_path(params):
        name = ".".join(map(str, path))
        expected = jnp.float32 if any(name.endswith(end) for end in wide) else jnp.bfloat16
        assert value.dtype == expected, name


def test_tensors_of_the_mtp_head_are_accepted_and_others_are_not(qwen, tmp_path):
    """D07 on a whole checkpoint: renamed, dropped and added tensors in one error."""
    tensors = {name: np.asarray(value) for name, value in TensorStore(qwen.folder).items()}
    config = read_config(qwen.folder)
    write_checkpoint(tmp_path / "mtp", tensors | {"mtp.fc.weight": np.zeros((2, 2))}, config)
    load_target(tmp_path / "mtp", "float32")
    old = "model.language_model.layers.0.linear_attn.A_log"
    tensors["model.language_model.layers.0.linear_attn.alog"] = tensors.pop(old)
    del tensors["model.language_model.norm.weight"]
    tensors["lm_head.weight"] = np.zeros((288, 64), np.float32)
    write_checkpoint(tmp_path / "bad", tensors, config)
    with pytest.raises(WeightsError) as error:
        load_target(tmp_path / "bad", "float32")
    for line in (
        f"missing: {old}",
        "unexpected: model.language_model.layers.0.linear_attn.alog",
        "missing: model.language_model.norm.weight",
        "unexpected: lm_head.weight",
    ):
        assert line in str(error.value)


def test_stop_ids_are_the_union_of_all_sources(qwen, tmp_path):
    """Released files disagree on the end: config, generation config and tokenizer are joined."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 256}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 7]}))
    assert stop_ids(tmp_path, 9, None) == (7, 9, 256, 258)
    assert 256 in stop_ids(qwen.folder)
