"""Reading of a draft's `config.json`: both places of each key, contradictions, what is refused."""

import json

import pytest

from mmflash_jax.drafters import DFlash
from mmflash_jax.drafters.dflash_config import default_layer_ids
from mmflash_jax.weights.hf_config import ConfigError

# Keys as z-lab and SpecForge write them, at a tiny width.
OWN = {"mask_token_id": 280, "target_layer_ids": [0, 2]}
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 288,
    "rope_theta": 1e7,
    "rope_scaling": None,
    "block_size": 16,
    "dflash_config": OWN,
}


def read(own=None, *, without=(), **top):
    """The config read from CONFIG with changes."""
    made = {**CONFIG, **top, "dflash_config": OWN if own is None else own}
    return DFlash.from_hf({k: v for k, v in made.items() if k not in without}, "float32").config


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (24, 5, [1, 6, 11, 16, 21]),
        (32, 5, [1, 8, 15, 22, 29]),
        (32, 6, [1, 7, 12, 18, 23, 29]),
        (32, 8, [1, 5, 9, 13, 17, 21, 25, 29]),
        (35, 5, [1, 9, 16, 24, 32]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),
        # Halves go to the even side: 10.5 -> 10, 29.5 -> 30.
        (42, 5, [1, 10, 20, 30, 39]),
        (48, 5, [1, 12, 23, 34, 45]),
        (60, 5, [1, 15, 29, 43, 57]),
        (60, 6, [1, 12, 23, 35, 46, 57]),
        (64, 5, [1, 16, 31, 46, 61]),
        (32, 1, [16]),
    ],
)
def test_default_layer_ids(layers, count, ids):
    assert default_layer_ids(layers, count) == ids


def test_layer_ids_default_by_the_number_of_draft_layers():
    made = read({"mask_token_id": 280}, num_target_layers=32, num_hidden_layers=5)
    assert made.target_layer_ids == (1, 8, 15, 22, 29)


def test_block_size_at_either_place():
    assert read().block_size == 16
    assert read({**OWN, "block_size": 8}, without=["block_size"]).block_size == 8
    assert read({**OWN, "block_size": 8}, block_size=8).block_size == 8
    with pytest.raises(ConfigError, match=r"block_size is 8 in dflash_config but 16 at top"):
        read({**OWN, "block_size": 8})


def test_own_keys_at_top_level():
    made = read({}, mask_token_id=7, target_layer_ids=[3, 1])
    assert (made.mask_token_id, made.target_layer_ids) == (7, (3, 1))
    made = read(None, without=["dflash_config"], mask_token_id=7)
    assert made.mask_token_id == 7


def test_a_target_of_another_width():
    assert read().target_hidden_size == 32
    assert read(target_hidden_size=64).target_hidden_size == 64


@pytest.mark.parametrize(
    ("top", "own", "layers"),
    [
        # Direction and window of a sliding and a full layer.
        ({}, {}, [(True, 6), (False, None)]),
        ({}, {"causal": True}, [(True, 6), (True, None)]),
        ({}, {"causal": False}, [(False, 6), (False, None)]),
        # The top level wins over dflash_config.
        ({"is_causal": True}, {"causal": False}, [(True, 6), (True, None)]),
        ({"is_causal": False}, {"causal": True}, [(False, 6), (False, None)]),
        ({}, {"use_swa": True, "swa_window_size": 9}, [(False, 9), (False, 9)]),
    ],
)
def test_direction_and_window_of_each_layer(top, own, layers):
    kinds = ["sliding_attention", "full_attention"]
    made = read({**OWN, **own}, layer_types=kinds, sliding_window=6, **top)
    assert [(layer.causal, layer.window) for layer in made.layers] == layers


def test_layers_are_full_without_layer_types():
    assert [(layer.causal, layer.window) for layer in read().layers] == [(False, None)] * 2


@pytest.mark.parametrize(
    "top",
    [
        {"rope_theta": 5.0},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 5.0}},
    ],
)
def test_rotary_base_at_either_place(top):
    """D04."""
    assert read(**top).rope_theta == 5.0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        # D04: disagreement, and no default.
        ({"rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", "5.0", "10000000.0"]),
        ({"rope_theta": None}, ["rope_theta"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type", "yarn"]),
        # D05: a target's rotary keys, wherever they stand and whatever stands beside them.
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "0.25"]),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
            ["partial_rotary_factor", "0.25"],
        ),
        (
            {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 1.0}},
            ["partial_rotary_factor", "0.25"],
        ),
        ({"rope_parameters": {"mrope_section": [3, 3, 2]}}, ["mrope_section"]),
        ({"rope_scaling": {"mrope_section": [3, 3, 2]}, "rope_parameters": {"rope_theta": 1e7}},
         ["mrope_section"]),
        ({"rope_parameters": {"mrope_interleaved": True}}, ["mrope_interleaved"]),
        # D16 and D17: no guess about the mask token and the head width.
        ({"dflash_config": {"mask_token_id": "123"}}, ["mask_token_id", "'123'"]),
        ({"dflash_config": {}}, ["mask_token_id", "None"]),
        ({"head_dim": None}, ["head_dim"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"num_target_layers": None}, ["num_target_layers"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["architectures", "DFlash2DraftModel"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "2"]),
        ({"layer_types": ["full_attention", "chunked"]}, ["layer_types", "chunked"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["sliding_window", "None"]),
    ],
)  # fmt: skip
def test_config_refuses(change, names):
    with pytest.raises(ConfigError) as error:
        DFlash.from_hf({**CONFIG, **change}, "float32")
    assert all(name in str(error.value) for name in names), error.value


def test_a_full_rotary_factor_is_harmless():
    assert read(rope_parameters={"partial_rotary_factor": 1.0}).rope_theta == 1e7


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"is_causal": True, "layer_types": ["full_attention"] * 2},
        {"attention_bias": True, "target_hidden_size": 64},
        {"dflash_config": {**OWN, "final_logit_softcapping": 30.0, "input_embedding_scale": 5.7}},
    ],
)
def test_written_config_reads_back(change):
    """D05: what is written gives the same plan, and holds none of a target's rotary keys."""
    drafter = DFlash.from_hf({**CONFIG, **change}, "float32")
    written = json.loads(json.dumps(drafter.config.to_hf()))
    assert DFlash.from_hf(written, "float32") == drafter
    assert not {"partial_rotary_factor", "mrope_section", "mrope_interleaved"} & set(written)


@pytest.mark.parametrize("size", [0, 1, "16", True])
def test_a_block_without_drafts_is_refused(size):
    own = {**OWN, "block_size": size}
    plain = {name: value for name, value in CONFIG.items() if name != "block_size"}
    with pytest.raises(ConfigError, match=f"block_size is {size!r}"):
        DFlash.from_hf({**plain, "dflash_config": own}, "float32")
