"""What holds of every family's tables and plans."""

import json

import numpy as np

from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.load import load_target
from mmflash_jax.targets import TARGETS
from mmflash_jax.weights import TensorStore, export_params, write_checkpoint


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def test_export_then_import_is_the_identity(loaded, tmp_path):
    """Tied and untied: every tensor of the checkpoint, and the parameters bit for bit."""
    rules = loaded.target.weight_rules()
    exported = export_params(rules, loaded.params, float32=[""])
    assert set(exported) == set(TensorStore(loaded.folder))
    write_checkpoint(tmp_path, exported, read_config(loaded.folder))
    target, params = load_target(tmp_path, "float32")
    assert target == loaded.target
    before, after = dict(leaves_with_path(loaded.params)), dict(leaves_with_path(params))
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=str(path))


def test_the_rules_cover_every_parameter_of_every_shape(loaded):
    paths = {rule.path for rule in loaded.target.weight_rules()}
    assert paths == {path for path, _ in leaves_with_path(loaded.target.abstract_params())}


def test_plans_are_hashable_and_equal_by_value(loaded):
    config = read_config(loaded.folder)
    again = TARGETS[config["architectures"][0]].from_hf(config, "float32")
    assert again == loaded.target
    assert hash(again) == hash(loaded.target)
