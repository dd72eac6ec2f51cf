"""Reading of a Gemma 4 `config.json` and of its checkpoints."""

import json

import jax
import numpy as np
import pytest

from benchmarks import shapes
from mmflash_jax.load import load_target
from mmflash_jax.targets.gemma4 import Gemma4
from mmflash_jax.weights import TensorStore, WeightsError, write_checkpoint
from mmflash_jax.weights.hf_config import ConfigError
from pallas_kernels import product
from tests.targets.conftest import GEMMA4
from tests.tiny_gemma4 import FULL, SLIDING, tiny_gemma4


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def change(config, **fields):
    """A copy with fields of `text_config` changed; None takes a field away."""
    text = {k: v for k, v in (config["text_config"] | fields).items() if v is not None}
    return config | {"text_config": text}


def e4b():
    """The released spelling of E4B's shape."""
    kinds = [SLIDING if (i + 1) % 6 else FULL for i in range(42)]
    text = {
        **shapes.GEMMA4_TEXT,
        "layer_types": kinds,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    vision = {**shapes.GEMMA4_VISION, "rms_norm_eps": 1e-6}
    tokens = {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882}
    return {"text_config": text, "vision_config": vision, **tokens}


def test_e4b_is_read_as_published():
    layers = Gemma4.from_hf(e4b(), "bfloat16").config.layers
    full = [i for i, layer in enumerate(layers) if layer.window is None]
    assert full == [5, 11, 17, 23, 29, 35, 41]
    assert {layer.head_dim for layer in layers} == {256, 512}
    assert [layer.source for layer in layers[:24]] == list(range(24))
    # Readers take the last maker of their kind.
    assert [layer.source for layer in layers[24:30]] == [22, 22, 22, 22, 22, 23]


def test_parameters_of_e4b_are_those_published():
    """Counts of gemma4.md 3.2, without audio: every parameter that a decode step can touch."""
    params = Gemma4.from_hf(e4b(), "bfloat16").abstract_params()

    def count(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    assert count(params["layers"]) == 3_945_824_554
    assert count(params["embed_tokens"]) == 671_088_640
    assert count(params["embed_tokens_per_layer"]) == 2_818_572_288
    projection = [params[f"per_layer_{name}"] for name in ("model_projection", "projection_norm")]
    assert count(projection) == 27_525_376
    assert count(params["visual"]) == 167_365_056 + 1_966_080


def test_a_row_of_8k_tokens_takes_less_than_160_mib():
    target = Gemma4.from_hf(e4b(), "bfloat16")
    arrays = jax.eval_shape(lambda: jax.tree.leaves(target.init_cache(1, 8192, 16)))
    assert sum(x.size * x.dtype.itemsize for x in arrays) <= 160 * 2**20


@pytest.mark.parametrize("width", [2, 3])
def test_head_widths_in_either_spelling(width):
    """Released: `global_head_dim`. transformers since 5.15: a map of what differs, whose numbers
    are padded with zeros once there are ten layers."""
    released = e4b()
    text = {k: v for k, v in released["text_config"].items() if k != "global_head_dim"}
    kinds = text["layer_types"]
    text["per_layer_config"] = {
        f"{i:0{width}}": {"head_dim": 512} for i, kind in enumerate(kinds) if kind == FULL
    }
    newer = Gemma4.from_hf(released | {"text_config": text}, "float32")
    assert newer == Gemma4.from_hf(released, "float32")


def test_twelve_layers_saved_by_transformers_load(tmp_path):
    kinds = [SLIDING, FULL] * 6
    tiny_gemma4(tmp_path, text={"num_hidden_layers": 12, "layer_types": kinds})
    target, _ = load_target(tmp_path, "float32")
    assert [layer.head_dim for layer in target.config.layers] == [16, 32] * 6


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        # B14: a checkpoint whose image tokens see each other both ways is refused.
        ({"use_bidirectional_attention": "vision"}, ["use_bidirectional_attention", "vision"]),
        ({"attention_k_eq_v": True}, ["attention_k_eq_v"]),
        ({"enable_moe_block": True}, ["enable_moe_block"]),
        ({"hidden_size_per_layer_input": 0}, ["hidden_size_per_layer_input"]),
        ({"hidden_activation": "silu"}, ["hidden_activation", "silu"]),
        ({"layer_types": [SLIDING] * 6}, ["layer_types", SLIDING]),
        ({"layer_types": ["chunked"] * 5 + [FULL]}, ["layer_types", "chunked"]),
        ({"num_hidden_layers": 7}, ["num_hidden_layers 7", "6 entries"]),
        ({"num_kv_shared_layers": 4}, ["num_kv_shared_layers is 4", FULL]),
        ({"sliding_window": None}, ["sliding_window"]),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, ["layer 1", "sliding_window"]),
        ({"per_layer_config": None}, ["global_head_dim"]),
        ({"rope_parameters": {FULL: {"rope_theta": 1.0}}}, ["rope_parameters", SLIDING]),
        (
            {"rope_parameters": {kind: {"rope_type": "yarn"} for kind in (FULL, SLIDING)}},
            ["rope_type", "yarn"],
        ),
    ],
)  # fmt: skip
def test_config_refuses_what_it_cannot_do(gemma, fields, names):
    with pytest.raises(ConfigError) as error:
        Gemma4.from_hf(change(read_config(gemma.folder), **fields), "float32")
    assert all(name in str(error.value) for name in names), error.value


def test_unused_tensors_of_released_files_are_skipped_by_name(gemma, tmp_path):
    """Audio, and the keys and values of layers that read another layer's; nothing else."""
    tensors = {name: np.asarray(value) for name, value in TensorStore(gemma.folder).items()}
    config = read_config(gemma.folder)
    layer = "model.language_model.layers.{}.self_attn.{}.weight"
    names = ("k_proj", "v_proj", "k_norm")
    unused: dict[str, np.ndarray] = {
        layer.format(index, name): np.zeros((2, 2)) for index in (3, 4, 5) for name in names
    }
    unused["model.audio_tower.layers.0.norm.weight"] = np.zeros(3)
    unused["model.embed_audio.embedding_projection.weight"] = np.zeros((2, 2))
    write_checkpoint(tmp_path / "released", tensors | unused, config)
    _, params = load_target(tmp_path / "released", "float32")
    jax.tree.map(np.testing.assert_array_equal, params, gemma.params)

    # The same tensors are needed where a layer makes its own keys.
    del tensors[layer.format(2, "k_proj")]
    tensors["model.vision_tower.extra.weight"] = np.zeros(1)
    write_checkpoint(tmp_path / "bad", tensors, config)
    with pytest.raises(WeightsError) as error:
        load_target(tmp_path / "bad", "float32")
    assert f"missing: {layer.format(2, 'k_proj')}" in str(error.value)
    assert "unexpected: model.vision_tower.extra.weight" in str(error.value)


def test_logits_are_capped_in_fp32_and_drafts_get_them_raw(gemma):
    hidden = 40 * jax.random.normal(jax.random.key(0), (1, 3, 64))
    raw = np.asarray(product.logits(hidden, gemma.target.head(gemma.params)))
    capped = np.asarray(gemma.target.logits(gemma.params, hidden))
    assert np.abs(raw).max() > 60
    np.testing.assert_allclose(capped, 30 * np.tanh(raw / 30), rtol=1e-5)
    assert "final_logit_softcapping" in read_config(gemma.folder)["text_config"]
    assert GEMMA4["own keys"]["text"]["final_logit_softcapping"] is None
