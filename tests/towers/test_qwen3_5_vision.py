"""The image tower of Qwen3.5 against transformers, on tiny random weights in fp32."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmflash_jax.layers.schema import abstract_module
from mmflash_jax.towers import patches as shared
from mmflash_jax.towers.qwen3_5_vision import VisionConfig, VisionTower, weight_rules
from mmflash_jax.weights import TensorStore, export_params, import_params
from mmflash_jax.weights.hf_config import ConfigError
from tests import tiny, tolerances
from tests.tolerances import assert_close

# (width, height): odd sizes of public reports, a square, a single merged token.
SIZES = [(150, 100), (57, 999), (161, 184), (128, 128), (1, 1)]
# Rounding to 8 bits of mantissa through two blocks; the released tower is deeper.
BFLOAT16 = 5e-2
NOT_VISUAL = (r"model\.language_model\.", r"lm_head\.")


class Loaded:
    """A tower with the parameters of a checkpoint, compiled once for each padded shape."""

    def __init__(self, folder, dtype=jnp.float32):
        config = json.loads((folder / "config.json").read_text())["vision_config"]
        self.config = VisionConfig.from_hf(config)
        self.rules = weight_rules(self.config, path=())
        structure, abstract = abstract_module(
            lambda rngs: VisionTower(self.config, dtype=jnp.dtype(dtype), rngs=rngs)
        )
        self.store = TensorStore(folder)
        self.params = import_params(self.rules, self.store, abstract, ignore=NOT_VISUAL)
        self.run = jax.jit(lambda params, *args: nnx.merge(structure, params)(*args))

    def __call__(self, images, bucket):
        """Feature rows of each `(patches, rows, columns)`, padding filled with noise."""
        noise = np.random.default_rng(9)
        pixels = images[0][0].shape[1]
        batch = noise.normal(size=(len(images), bucket, pixels)).astype(np.float32)
        for index, (patches, _, _) in enumerate(images):
            batch[index, : len(patches)] = patches
        rows = jnp.array([image[1] for image in images], jnp.int32)
        columns = jnp.array([image[2] for image in images], jnp.int32)
        features = np.asarray(self.run(self.params, jnp.asarray(batch), rows, columns))
        assert np.isfinite(features).all()
        unit = self.config.spatial_merge_size**2
        return [features[i, : len(image[0]) // unit] for i, image in enumerate(images)]


@pytest.fixture(scope="module")
def tower(qwen35):
    return Loaded(qwen35.folder)


def patch(width, height, *, size=tiny.SMALL_IMAGES):
    """A random image, preprocessed: `(patches, rows, columns)`."""
    rng = np.random.default_rng(width * 1000 + height)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    processor = Qwen2VLImageProcessorPil(
        size=dict(size), patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    made = processor(images=[image], return_tensors="np")
    _, rows, columns = made["image_grid_thw"][0]
    return made["pixel_values"], int(rows), int(columns)


def reference(model, images):
    """Feature rows of each image by transformers."""
    pixels = torch.from_numpy(np.concatenate([image[0] for image in images]))
    grid = torch.tensor([[1, rows, columns] for _, rows, columns in images])
    with torch.no_grad():
        made = model.model.get_image_features(pixels, grid)
    return [feature.float().numpy() for feature in made.pooler_output]


def test_features_match_transformers_in_one_padded_batch(qwen35, tower):
    images = [patch(*size) for size in SIZES]
    bucket = 4 * (max(len(image[0]) for image in images) // 4 + 3)
    for got, wanted in zip(tower(images, bucket), reference(qwen35.model, images), strict=True):
        assert_close(got, wanted, tolerances.LAYER)


def test_features_do_not_depend_on_the_bucket_or_the_neighbours(tower):
    images = [patch(*size) for size in SIZES[:3]]
    together = tower(images, 320)
    for image, wanted in zip(images, together, strict=True):
        assert_close(tower([image], 256)[0], wanted, tolerances.LAYER)


def test_one_program_serves_every_size_of_a_bucket(tower):
    tower([patch(150, 100)], 256)
    before = tower.run._cache_size()
    for size in [(64, 64), (97, 130), (57, 999)]:
        tower([patch(*size)], 256)
    assert tower.run._cache_size() == before


def test_rows_and_columns_are_told_apart(tower):
    """Same patches read as 4 x 16 and as 16 x 4: only positions differ."""
    patches = patch(256, 64, size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256})[0]
    wide, tall = tower([(patches, 4, 16), (patches, 16, 4)], 64)
    assert np.abs(wide - tall).max() > 1e-2


def test_an_image_of_no_patches_gives_finite_rows(tower):
    real = patch(150, 100)
    empty = (np.zeros((0, real[0].shape[1]), np.float32), 0, 0)
    assert_close(tower([real, empty], 64)[0], tower([real], 64)[0], tolerances.LAYER)


@pytest.mark.parametrize(
    "vision",
    [
        {"depth": 1, "spatial_merge_size": 3, "num_position_embeddings": 49},
        {"depth": 3, "hidden_size": 48, "num_heads": 4, "patch_size": 8, "temporal_patch_size": 1},
    ],
)
def test_every_size_comes_from_the_config(tmp_path, vision):
    model = tiny.tiny_qwen35(tmp_path, seed=3, vision=vision)
    other = Loaded(tmp_path)
    rng = np.random.default_rng(0)
    c = other.config
    pixels = c.in_channels * c.temporal_patch_size * c.patch_size**2
    sides = [(2, 3), (4, 1)]
    images = []
    for down, across in sides:
        rows, columns = down * c.spatial_merge_size, across * c.spatial_merge_size
        images.append((rng.normal(size=(rows * columns, pixels)).astype(np.float32), rows, columns))
    bucket = c.spatial_merge_size**2 * 7
    for got, wanted in zip(other(images, bucket), reference(model, images), strict=True):
        assert_close(got, wanted, tolerances.LAYER)


def test_tower_in_chunks_matches_transformers(qwen35, monkeypatch):
    image = patch(161, 184)
    monkeypatch.setattr(shared, "MAX_SCORES", 4096)
    got = Loaded(qwen35.folder)([image], 160)[0]
    assert_close(got, reference(qwen35.model, [image])[0], tolerances.LAYER)


def test_bfloat16_stays_near_float32(qwen35, tower):
    image = patch(161, 184)
    got = Loaded(qwen35.folder, jnp.bfloat16)([image], 160)[0].astype(np.float32)
    assert_close(got, tower([image], 160)[0], tolerance=BFLOAT16)


def test_rules_export_what_they_import(tower):
    exported = export_params(tower.rules, tower.params, float32=[""])
    visual = {name for name in tower.store if name.startswith("model.visual.")}
    assert set(exported) == visual
    for name, value in exported.items():
        np.testing.assert_array_equal(value, tower.store[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"deepstack_visual_indexes": [5]}, ["deepstack_visual_indexes", "[5]"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_type", "yarn"]),
        ({"num_position_embeddings": 50}, ["num_position_embeddings", "50"]),
        ({"patch_size": [16, 14]}, ["patch_size", "[16, 14]"]),
        ({"num_heads": 5}, ["num_heads", "5"]),
        ({"out_hidden_size": None}, ["out_hidden_size"]),
    ],
)
def test_config_refuses_what_it_cannot_do(qwen35, change, names):
    config = json.loads((qwen35.folder / "config.json").read_text())["vision_config"]
    with pytest.raises(ConfigError) as error:
        VisionConfig.from_hf(config | change)
    assert all(name in str(error.value) for name in names)
