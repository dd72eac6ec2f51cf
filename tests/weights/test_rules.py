"""Strict import by two-way tables, and export as its inverse."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mmflash_jax.sharding import make_mesh, sharding_by_rules
from mmflash_jax.weights import (
    SQUEEZE_CONV1D,
    TRANSPOSE,
    Rule,
    TensorStore,
    WeightsError,
    export_params,
    import_params,
)
from tests.weights.test_store import write_shards

RULES = [
    Rule("embed.weight", ("embed", "embedding")),
    Rule("fc.weight", ("fc", "kernel"), TRANSPOSE),
    Rule("conv.weight", ("layers", 0, "conv"), SQUEEZE_CONV1D),
    Rule("scale", ("layers", 0, "scale")),
]
ABSTRACT = {
    "embed": {"embedding": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)},
    "fc": {"kernel": jax.ShapeDtypeStruct((4, 6), jnp.float32)},
    "layers": {
        0: {
            "conv": jax.ShapeDtypeStruct((3, 5), jnp.float32),
            "scale": jax.ShapeDtypeStruct((2,), jnp.float32),
        }
    },
}


def tensors():
    rng = np.random.default_rng(0)
    shapes = {"embed.weight": (8, 4), "fc.weight": (6, 4), "conv.weight": (5, 1, 3), "scale": (2,)}
    # Values that bf16 holds exactly, so that export and import lose nothing.
    return {
        name: rng.integers(-9, 9, shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def test_each_parameter_arrives_in_its_layout_and_dtype():
    stored = tensors()
    params = import_params(RULES, stored, ABSTRACT)
    assert params["embed"]["embedding"].dtype == jnp.bfloat16
    assert params["fc"]["kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(params["fc"]["kernel"], stored["fc.weight"].T)
    conv = np.asarray(params["layers"][0]["conv"])
    np.testing.assert_array_equal(conv, stored["conv.weight"][:, 0].T)


def test_export_is_the_inverse_of_import():
    stored = tensors()
    exported = export_params(RULES, import_params(RULES, stored, ABSTRACT), float32=["^scale$"])
    assert set(exported) == set(stored)
    for name, value in stored.items():
        np.testing.assert_array_equal(exported[name], value, err_msg=name)
        assert exported[name].dtype == (np.float32 if name == "scale" else ml_dtypes.bfloat16)


def test_one_error_names_every_tensor_at_fault(tmp_path):
    """D07: renamed (missing and unexpected), mis-shaped and stored twice, all at once."""
    stored = tensors()
    stored["fc_renamed.weight"] = stored.pop("fc.weight")
    stored["conv.weight"] = stored["conv.weight"][:, :, :2].copy()
    stored["extra.bias"] = stored["scale"].copy()
    write_shards(tmp_path, stored, {"embed.weight": stored["embed.weight"]})
    with pytest.raises(WeightsError) as error:
        import_params(RULES, TensorStore(tmp_path), ABSTRACT)
    message = str(error.value)
    for line in (
        "5 tensors",
        "missing: fc.weight",
        "unexpected: fc_renamed.weight",
        "unexpected: extra.bias",
        "stored twice: embed.weight",
        "wrong shape: conv.weight is [5, 1, 2]",
        "layers.0.conv needs [3, 5]",
    ):
        assert line in message


def test_ignored_names_may_be_there_and_nothing_else():
    stored = tensors() | {"mtp.fc.weight": np.zeros(3), "my.mtp.fc": np.zeros(3)}
    with pytest.raises(WeightsError) as error:
        import_params(RULES, stored, ABSTRACT, ignore=[r"mtp\."])
    assert "unexpected: my.mtp.fc" in str(error.value)
    assert "unexpected: mtp.fc" not in str(error.value)


def test_a_wrong_table_is_named():
    rules = [*RULES[:3], Rule("fc.weight", ("elsewhere",)), Rule("x", ("fc", "kernel"))]
    with pytest.raises(WeightsError) as error:
        import_params(rules, tensors(), ABSTRACT)
    for line in (
        "matched twice: fc.weight",
        "filled twice, or not whole: fc.kernel",
        "no rule for parameter: layers.0.scale",
        "rule for no parameter: elsewhere",
    ):
        assert line in str(error.value)


SIDE_BY_SIDE = [
    Rule("a.weight", ("both", "kernel"), TRANSPOSE, (0, 2)),
    Rule("b.weight", ("both", "kernel"), TRANSPOSE, (2, 5)),
]
BOTH = {"both": {"kernel": jax.ShapeDtypeStruct((4, 5), jnp.float32)}}


def test_tensors_may_lie_side_by_side_in_a_parameter():
    rng = np.random.default_rng(0)
    stored = {"a.weight": rng.normal(size=(2, 4)), "b.weight": rng.normal(size=(3, 4))}
    # The order of the rules does not matter.
    params = import_params(SIDE_BY_SIDE[::-1], stored, BOTH)
    joined = np.concatenate([stored["a.weight"].T, stored["b.weight"].T], axis=1)
    np.testing.assert_array_equal(params["both"]["kernel"], joined.astype(np.float32))
    exported = export_params(SIDE_BY_SIDE, params, float32=["weight"])
    for name, value in stored.items():
        np.testing.assert_array_equal(exported[name], value.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("columns", [(1, 4), (2, 4), (3, 5), (2, 6), None])
def test_columns_that_overlap_or_are_missing_are_named(columns):
    rules = [SIDE_BY_SIDE[0], Rule("b.weight", ("both", "kernel"), TRANSPOSE, columns)]
    stored = {"a.weight": np.zeros((2, 4)), "b.weight": np.zeros((3, 4))}
    with pytest.raises(WeightsError, match=r"filled twice, or not whole: both\.kernel"):
        import_params(rules, stored, BOTH)


def test_a_part_of_the_wrong_shape_is_named():
    stored = {"a.weight": np.zeros((2, 4)), "b.weight": np.zeros((2, 4))}
    with pytest.raises(WeightsError, match=r"b\.weight is \[2, 4\].*needs \[4, 3\]"):
        import_params(SIDE_BY_SIDE, stored, BOTH)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_each_device_receives_its_slice_only():
    mesh = make_mesh(4)
    rules = [(r"embed\.embedding$", ("model", None))]
    stored = tensors()
    params = import_params(RULES, stored, ABSTRACT, sharding=sharding_by_rules(rules, mesh))
    table = params["embed"]["embedding"]
    for shard in table.addressable_shards:
        assert shard.data.shape == (2, 4)
        np.testing.assert_array_equal(shard.data, stored["embed.weight"][shard.index])
    assert {shard.device for shard in table.addressable_shards} == set(mesh.devices.flat)
    assert params["fc"]["kernel"].sharding.is_fully_replicated
