"""The mesh, the rules from paths to axes, and a sharded target that computes the same."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.load import load_target
from mmflash_jax.sharding import (
    make_mesh,
    make_training_mesh,
    sharding_by_rules,
    split_largest_axis,
)
from tests.targets.passes import prefill
from tests.targets.prompts import make_prompt
from tests.tolerances import LAYER, assert_close

needs_four = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


def test_more_devices_than_there_are_is_an_error():
    count = len(jax.devices())
    with pytest.raises(ValueError, match=f"model is {count + 1}, but there are {count}"):
        make_mesh(count + 1)


def test_the_first_rule_that_matches_decides():
    rules = [(r"mlp\.up\.kernel$", (None, "model")), (r"kernel$", ("model", None))]
    of = sharding_by_rules(rules, make_mesh(1))
    for path, axes in (
        (("mlp", "up", "kernel"), (None, "model")),
        (("layers", 3, "kernel"), ("model", None)),
        (("norm",), ()),
    ):
        sharding = of(path)
        assert isinstance(sharding, NamedSharding)
        assert sharding.spec == PartitionSpec(*axes)


def test_without_a_mesh_nothing_is_placed():
    assert sharding_by_rules([(r".", ("model",))], None)(("x",)) is None


@needs_four
def test_the_largest_axis_that_divides_is_split():
    mesh = make_training_mesh(1, 4)
    assert mesh is not None
    for shape, axes in (
        ((8, 16), (None, "fsdp")), ((16, 8), ("fsdp",)), ((8, 18), ("fsdp",)), ((3, 5), ()),
        ((), ()), ((4,), ("fsdp",)),
    ):  # fmt: skip
        assert split_largest_axis(shape, mesh, "fsdp").spec == PartitionSpec(*axes)
    assert make_training_mesh(1, 1) is None


@needs_four
@pytest.mark.parametrize("width", [2, 4])
def test_a_sharded_target_computes_the_same(qwen35, width):
    """Each device holds its slices; logits equal those of one device."""
    target, whole = load_target(qwen35.folder, "float32")
    mesh = make_mesh(width)
    _, params = load_target(qwen35.folder, "float32", mesh)
    split = 0
    for path, array in leaves_with_path(params):
        shards = array.addressable_shards
        assert len(shards) == width, path
        split += not array.sharding.is_fully_replicated
        original = np.asarray(dict(leaves_with_path(whole))[path])
        for shard in shards:
            np.testing.assert_array_equal(shard.data, original[shard.index], err_msg=str(path))
    # Embedding or head, and of four layers two parameters of the MLP and two of the mixer.
    assert split == 17
    prompt = make_prompt(target, 3, (4, 4), 9, seed=0)
    one, many = (
        prefill(target, these, [prompt], [16], capacity=16).logits[0] for these in (whole, params)
    )
    assert_close(many, one, LAYER)
