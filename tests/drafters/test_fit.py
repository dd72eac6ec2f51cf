"""A draft meets a target: what does not belong together is refused with every field named."""

import dataclasses
import json

import numpy as np
import pytest

from mmflash_jax.drafters import FitError
from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.weights import (
    TensorStore,
    WeightsError,
    export_params,
    write_checkpoint,
)
from tests.drafters import zlab
from tests.drafters.zlab import FULL, SLIDING

FITTING = {
    "layers": [SLIDING, FULL],
    "sliding_window": 6,
    "hidden_size": 64,
    "num_target_layers": 4,
    "own": {"target_layer_ids": [0, 2, 3], "block_size": 8},
}


@pytest.fixture(scope="module")
def target(qwen35):
    return load_target(qwen35.folder, "float32")[0]


def test_z_lab_folder_loads_through_load_drafter(target, tmp_path):
    """A folder that z-lab's class wrote with save_pretrained, every tensor in its place."""
    model = zlab.save(tmp_path, **FITTING)
    drafter, params = load_drafter(tmp_path, target, "float32")
    assert drafter.block == 8
    assert drafter.capture == (0, 2, 3)
    stored = dict(model.named_parameters())
    ours = export_params(drafter.weight_rules(), params, float32=[""])
    assert ours.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(ours[name], value.detach().numpy(), err_msg=name)


def test_export_then_import_is_the_identity(target, tmp_path):
    """And z-lab's class reads our folder: D06, exactly the expected tensors."""
    zlab.save(tmp_path / "a", **FITTING)
    drafter, params = load_drafter(tmp_path / "a", target, "float32")
    tensors = export_params(drafter.weight_rules(), params, float32=[""])
    write_checkpoint(tmp_path / "b", tensors, drafter.config.to_hf())
    again, same = load_drafter(tmp_path / "b", target, "float32")
    assert dataclasses.replace(again.config, max_position_embeddings=0) == dataclasses.replace(
        drafter.config, max_position_embeddings=0
    )
    after = dict(leaves_with_path(same))
    for path, value in leaves_with_path(params):
        np.testing.assert_array_equal(after[path], value, err_msg=str(path))
    theirs = zlab.dflash.DFlashDraftModel.from_pretrained(tmp_path / "b", dtype="float32")
    assert theirs.block_size == 8
    assert set(theirs.state_dict()) == set(tensors)
    for name, value in theirs.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), tensors[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"hidden_size": 32}, ["hidden_size: draft 32, target 64"]),
        ({"num_target_layers": 32}, ["num_target_layers: draft 32, target 4"]),
        ({"vocab_size": 300}, ["vocab_size: draft 300, target 288"]),
        # One past the last layer is a mistake of other projects' counting.
        (
            {"own": {"target_layer_ids": [1, 4]}},
            ["target_layer_ids: draft [4], target has layers 0..3"],
        ),
        (
            {"own": {"target_layer_ids": [0, -1]}},
            ["target_layer_ids: draft [-1], target has layers 0..3"],
        ),
        # D16: the mask embedding is a row of the target's table.
        (
            {"own": {"mask_token_id": 288, "target_layer_ids": [0]}},
            ["mask_token_id: draft 288, target table has rows 0..287"],
        ),
        ({"own": {"mask_token_id": -1, "target_layer_ids": [0]}}, ["mask_token_id: draft -1"]),
        # C16: all of it in one message.
        (
            {
                "hidden_size": 48,
                "num_target_layers": 5,
                "vocab_size": 300,
                "own": {"mask_token_id": 299, "target_layer_ids": [0, 9]},
            },
            [
                "hidden_size: draft 48, target 64",
                "num_target_layers: draft 5, target 4",
                "vocab_size: draft 300, target 288",
                "target_layer_ids: draft [9]",
                "mask_token_id: draft 299",
            ],
        ),
    ],
)
def test_a_misfit_is_refused_with_both_values(target, tmp_path, change, names):
    """C16: before any tensor is read."""
    zlab.save(tmp_path, **{**FITTING, **change})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FitError) as error:
        load_drafter(tmp_path, target, "float32")
    assert all(name in str(error.value) for name in names), error.value


def test_more_layer_ids_than_the_projection_holds(target, tmp_path):
    """D12: one captured layer too many for the width of fc."""
    zlab.save(tmp_path, **FITTING)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 1, 2, 3]
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError) as error:
        load_drafter(tmp_path, target, "float32")
    assert "fc.weight is [64, 192]" in str(error.value)
    assert "fc.kernel needs [256, 64]" in str(error.value)


def test_tensors_of_an_embedding_are_not_taken_silently(target, tmp_path):
    """D06: a draft has no table of its own."""
    zlab.save(tmp_path, **FITTING)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = dict(TensorStore(tmp_path)) | {"embed_tokens.weight": np.zeros((288, 64))}
    write_checkpoint(tmp_path / "more", tensors, config)
    with pytest.raises(WeightsError, match=r"unexpected: embed_tokens\.weight"):
        load_drafter(tmp_path / "more", target, "float32")
