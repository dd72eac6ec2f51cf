"""Lazy reading of safetensors folders: one file, shards, damage."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmflash_jax.weights import TensorStore, write_checkpoint

RNG = np.random.default_rng(0)
TENSORS = {
    "a.weight": RNG.normal(size=(4, 6)).astype(np.float32),
    "b.weight": RNG.normal(size=(3,)).astype(ml_dtypes.bfloat16),
    "c.weight": np.arange(5, dtype=np.int64),
    "scalar": np.array(2.5, np.float16),
}


def write_shards(folder, *shards):
    """A sharded checkpoint; the index points each name at the last shard that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        for tensor in tensors:
            weight_map[tensor] = name
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_holds(store, tensors):
    assert set(store) == set(tensors)
    assert len(store) == len(tensors)
    for name, value in tensors.items():
        assert store[name].dtype == value.dtype
        np.testing.assert_array_equal(store[name], value, err_msg=name)


def test_reads_one_file(tmp_path):
    write_checkpoint(tmp_path, TENSORS, {"architectures": ["X"]})
    assert_holds(TensorStore(tmp_path), TENSORS)
    assert json.loads((tmp_path / "config.json").read_text()) == {"architectures": ["X"]}


def test_reads_shards_by_their_index(tmp_path):
    names = list(TENSORS)
    first, second = ({n: TENSORS[n] for n in part} for part in (names[:2], names[2:]))
    write_shards(tmp_path, first, second)
    store = TensorStore(tmp_path)
    assert_holds(store, TENSORS)
    assert store.duplicates == []


def test_names_a_tensor_that_two_shards_hold(tmp_path):
    write_shards(tmp_path, TENSORS, {"b.weight": TENSORS["b.weight"]})
    assert TensorStore(tmp_path).duplicates == ["b.weight"]


def test_names_the_shard_that_is_not_there(tmp_path):
    write_shards(tmp_path, {"a": np.zeros(2, np.float32)}, {"b": np.zeros(2, np.float32)})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        TensorStore(tmp_path)


def test_names_what_a_folder_without_weights_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        TensorStore(tmp_path)


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_refuses_a_truncated_file(tmp_path, left):
    """Cut inside the length, the header or the last tensor."""
    write_checkpoint(tmp_path, TENSORS, {})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        TensorStore(tmp_path)


def test_maps_files_instead_of_reading_them(tmp_path):
    """Opening looks at headers only, a tensor is a view of the mapped file."""
    write_checkpoint(tmp_path, TENSORS, {})
    store = TensorStore(tmp_path)
    assert not store._maps
    base = store["a.weight"]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not base.flags.writeable


def test_names_a_dtype_that_it_cannot_read(tmp_path):
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"\0\0"
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"x has dtype F8_E4M3"):
        TensorStore(tmp_path)["x"]
