"""The image tower of Gemma 4 against transformers, on tiny random weights."""

import copy
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from mmflash_jax.layers.norm import GemmaRMSNorm
from mmflash_jax.layers.schema import abstract_module
from mmflash_jax.towers.gemma4_vision import (
    BOUNDS,
    VisionTower,
    unpack,
    weight_rules,
)
from mmflash_jax.towers.gemma4_vision_config import VisionConfig
from mmflash_jax.weights import TensorStore, WeightsError, export_params, import_params
from mmflash_jax.weights.hf_config import ConfigError
from tests import tiny, tolerances
from tests.tolerances import assert_close

# (width, height): ordinary, odd sides, a strip (one block high), a square, one pixel.
SIZES = [(64, 48), (37, 91), (200, 10), (50, 50), (1, 1)]
# The model as a whole: head norms without a scale make sharp attention, and the library's own fp32
# is 1.4e-5 away from its fp64 on these weights.
FEATURES = tolerances.MODEL
# The library's bfloat16 is up to 1e-1 from its fp32 here and its two kinds of attention are 8e-2
# apart. Rounding where it rounds gives 2e-2; the compiler's leave to round less, 6e-2.
BFLOAT16_SAME_ROUNDING = 3e-2
BFLOAT16 = 1e-1
NOT_VISUAL = (r"model\.language_model\.", r"lm_head\.")
PROJECTIONS = [("self_attn", f"{letter}_proj") for letter in "qkvo"]
PROJECTIONS += [("mlp", f"{name}_proj") for name in ("gate", "up", "down")]


def make(folder, *, seed=0, **vision):
    """Write a tiny Gemma 4 without audio to `folder`; return its transformers model."""
    text = Gemma4TextConfig(
        vocab_size=32,
        vocab_size_per_layer_input=32,
        hidden_size=40,
        hidden_size_per_layer_input=4,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=8,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 224,
        "use_clipped_linears": True,
        **vision,
    }
    config = Gemma4Config(
        text_config=text,
        vision_config=Gemma4VisionConfig(**settings),
        audio_config=None,
        image_token_id=20,
        boi_token_id=21,
        eoi_token_id=22,
        audio_token_id=23,
        boa_token_id=24,
        eoa_token_index=25,
        video_token_id=26,
    )
    model = Gemma4ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    randomise(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model, seed):
    """Values that matter everywhere in the tower, bounds so tight that every one bites."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if "vision" not in name:
            continue
        noise = torch.randn(value.shape, generator=generator)
        spread = torch.rand(value.shape, generator=generator)
        kind = name.rpartition(".")[2]
        if kind in BOUNDS:
            size = 0.2 + 0.2 * spread if kind.startswith("input") else 0.8 + 0.5 * spread
            value.copy_(size if kind.endswith("max") else -size)
        elif "norm" in name or kind == "std_scale":
            value.copy_(0.5 + spread)
        elif kind in ("position_embedding_table", "std_bias"):
            value.copy_(0.3 * noise)
        else:
            value.copy_(3.0 * noise / math.sqrt(value.shape[-1]))


class Loaded:
    """A tower with the parameters of a checkpoint, compiled once for each padded shape."""

    def __init__(self, folder, dtype=jnp.float32, **compiler_options):
        config = json.loads((folder / "config.json").read_text())
        text_width = config["text_config"]["hidden_size"]
        self.config = VisionConfig.from_hf(config["vision_config"], text_width)
        self.rules = weight_rules(self.config, path=())
        structure, self.abstract = abstract_module(
            lambda rngs: VisionTower(self.config, dtype=jnp.dtype(dtype), rngs=rngs)
        )
        self.store = TensorStore(folder)
        self.params = import_params(self.rules, self.store, self.abstract, ignore=NOT_VISUAL)
        self.run = jax.jit(
            lambda params, *args: nnx.merge(structure, params)(*args),
            compiler_options=compiler_options or None,
        )

    def __call__(self, images, bucket, params=None):
        """Feature rows of each `(patches, rows, columns)`, padding filled with noise."""
        noise = np.random.default_rng(9)
        pixels = images[0][0].shape[1]
        batch = noise.normal(size=(len(images), bucket, pixels)).astype(np.float32)
        for index, (patches, _, _) in enumerate(images):
            batch[index, : len(patches)] = patches
        rows = jnp.array([image[1] for image in images], jnp.int32)
        columns = jnp.array([image[2] for image in images], jnp.int32)
        made = self.run(params or self.params, jnp.asarray(batch), rows, columns)
        features = np.asarray(made.astype(jnp.float32))
        unit = self.config.pooling_kernel_size**2
        assert features.shape[1] == math.ceil(bucket / unit)
        assert np.isfinite(features).all()
        return [features[i, : len(image[0]) // unit] for i, image in enumerate(images)]


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    return tiny.Checkpoint(folder, make(folder))


@pytest.fixture(scope="module")
def tower(gemma4):
    return Loaded(gemma4.folder)


def preprocess(width, height, pool=3):
    """A random image through the family's processor."""
    rng = np.random.default_rng(width * 1000 + height)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=pool)
    return processor(images=[image], return_tensors="np")


def invent(rows, columns, patch_size=4, padded=None, seed=0):
    """Random pixels of a grid of patches in the processor's layout, padded to `padded` patches."""
    rng = np.random.default_rng(seed)
    real, padded = rows * columns, padded or rows * columns
    pixels = np.zeros((1, padded, 3 * patch_size**2), np.float32)
    pixels[0, :real] = rng.random((real, pixels.shape[2]))
    positions = np.full((1, padded, 2), -1)
    y, x = np.divmod(np.arange(real), columns)
    positions[0, :real] = np.stack([x, y], axis=-1)
    return {"pixel_values": pixels, "image_position_ids": positions}


def reference(model, made):
    """Feature rows of each preprocessed image by transformers, in one batch."""
    pixels = torch.from_numpy(np.concatenate([one["pixel_values"] for one in made]))
    positions = torch.from_numpy(np.concatenate([one["image_position_ids"] for one in made]))
    with torch.no_grad():
        features = model.model.get_image_features(pixels.float(), positions).pooler_output
    return [feature.float().numpy() for feature in features]


def test_features_match_transformers_in_one_padded_batch(gemma4, tower):
    made = [preprocess(*size) for size in SIZES]
    images = [unpack(one, 3) for one in made]
    assert len({(rows, columns) for _, rows, columns in images}) >= 4
    # No multiple of 9: the tower pads by itself.
    bucket = max(len(image[0]) for image in images) + 5
    for got, wanted in zip(tower(images, bucket), reference(gemma4.model, made), strict=True):
        assert_close(got, wanted, FEATURES)


def test_features_do_not_depend_on_the_bucket_or_the_neighbours(tower):
    images = [unpack(invent(*grid, seed=grid[0]), 3) for grid in [(6, 9), (3, 12), (9, 3)]]
    together = tower(images, 90)
    for image, wanted in zip(images, together, strict=True):
        for bucket in (len(image[0]), 61):
            assert_close(tower([image], bucket)[0], wanted, FEATURES)


def test_one_program_serves_every_size_of_a_bucket(tower):
    tower([unpack(invent(6, 9), 3)], 81)
    before = tower.run._cache_size()
    for grid in [(3, 3), (9, 9), (27, 3)]:
        tower([unpack(invent(*grid), 3)], 81)
    assert tower.run._cache_size() == before


@pytest.mark.parametrize("sides", [(0, 0), (2, 2), (3, 3)])
def test_batch_padding_gives_finite_rows(tower, sides):
    """The helper checks that every row is finite."""
    real = unpack(invent(6, 9), 3)
    empty = (np.zeros((sides[0] * sides[1], 48), np.float32), *sides)
    assert_close(tower([real, empty], 61)[0], tower([real], 61)[0], FEATURES)


@pytest.mark.parametrize(
    "vision",
    [
        {"pooling_kernel_size": 2, "use_clipped_linears": False, "num_hidden_layers": 3},
        {"pooling_kernel_size": 2, "patch_size": 2, "head_dim": 12, "num_attention_heads": 2},
        {"pooling_kernel_size": 3, "standardize": True, "position_embedding_size": 16},
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 10.0}, "rms_norm_eps": 1e-3},
    ],
)
def test_every_size_comes_from_the_config(tmp_path, vision):
    heads = vision.get("num_attention_heads", 3)
    model = make(tmp_path, seed=3, **{**vision, "num_key_value_heads": heads})
    other = Loaded(tmp_path)
    pool, size = other.config.pooling_kernel_size, other.config.patch_size
    padded = pool**2 * 12
    grids = [(2 * pool, 3 * pool), (4 * pool, pool), (3 * pool, 4 * pool)]
    made = [invent(*grid, size, padded, seed=index) for index, grid in enumerate(grids)]
    images = [unpack(one, pool) for one in made]
    for got, wanted in zip(other(images, padded + 1), reference(model, made), strict=True):
        assert_close(got, wanted, FEATURES)


def test_processor_with_blocks_of_two(tmp_path):
    model = make(tmp_path, seed=4, pooling_kernel_size=2)
    made = [preprocess(*size, pool=2) for size in SIZES[:3]]
    images = [unpack(one, 2) for one in made]
    bucket = max(len(image[0]) for image in images)
    for got, wanted in zip(Loaded(tmp_path)(images, bucket), reference(model, made), strict=True):
        assert_close(got, wanted, FEATURES)


def test_every_bound_bites(tower):
    """Else agreement with the reference would not show that it is applied, and where."""
    image = unpack(invent(12, 9), 3)
    whole = tower([image], 108)[0]
    for part, name in PROJECTIONS:
        for bound in BOUNDS:
            params = copy.deepcopy(tower.params)
            end = -np.inf if bound.endswith("min") else np.inf
            bounds = params["layers"][0][part][name]
            bounds[bound] = jnp.full_like(bounds[bound], end)
            change = np.abs(tower([image], 108, params)[0] - whole).max() / np.abs(whole).max()
            assert change > 10 * FEATURES, (name, bound, change)


@pytest.mark.parametrize("weighted", [True, False])
def test_norm_rounds_where_transformers_rounds(weighted):
    """bfloat16 in and out, bit for bit but for a rare last-place difference."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 64), (64,)))
    theirs = Gemma4RMSNorm(64, eps=1e-6, with_scale=weighted).bfloat16()
    ours = GemmaRMSNorm(64, eps=1e-6, dtype=jnp.dtype("bfloat16"), weighted=weighted)
    with torch.no_grad():
        if weighted:
            theirs.weight.copy_(torch.from_numpy(weight))
        wanted = theirs(torch.from_numpy(x).bfloat16()).float().numpy()
    if ours.weight is not None:
        ours.weight[...] = jnp.asarray(weight, jnp.bfloat16)
    got = np.asarray(ours(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32))
    assert (got != wanted).mean() < 0.01
    np.testing.assert_allclose(got, wanted, rtol=2**-7)


def test_bfloat16_matches_transformers(gemma4):
    """Loaded with `dtype`: `.to` would round the rotary frequencies, which the library keeps."""
    model = Gemma4ForConditionalGeneration.from_pretrained(gemma4.folder, dtype=torch.bfloat16)
    made = [preprocess(*size) for size in SIZES[:3]]
    images = [unpack(one, 3) for one in made]
    wanted = reference(model.eval(), made)
    usual = Loaded(gemma4.folder, jnp.bfloat16)
    strict = Loaded(gemma4.folder, jnp.bfloat16, xla_allow_excess_precision=False)
    for loaded, tolerance in ((usual, BFLOAT16), (strict, BFLOAT16_SAME_ROUNDING)):
        for ours, theirs in zip(loaded(images, 630), wanted, strict=True):
            assert_close(ours, theirs, tolerance)


def test_rules_export_what_they_import(tower):
    exported = export_params(tower.rules, tower.params, float32=[""])
    visual = {name for name in tower.store if "language_model" not in name}
    assert set(exported) == visual
    for name, value in exported.items():
        assert value.shape == tower.store[name].shape, name
        np.testing.assert_array_equal(value, tower.store[name], err_msg=name)


def test_default_places(tower):
    paths = {rule.path: rule.hf for rule in weight_rules(tower.config)}
    bound = ("visual", "layers", 1, "mlp", "up_proj", "output_min")
    assert paths[bound] == "model.vision_tower.encoder.layers.1.mlp.up_proj.output_min"
    kernel = ("visual", "embed_vision", "embedding_projection", "kernel")
    assert paths[kernel] == "model.embed_vision.embedding_projection.weight"


def test_a_missing_or_superfluous_bound_is_named(gemma4, tower):
    name = "model.vision_tower.encoder.layers.1.self_attn.k_proj.input_max"
    lacking = {key: tower.store[key] for key in tower.store if key != name}
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        import_params(tower.rules, lacking, tower.abstract, ignore=NOT_VISUAL)
    config = json.loads((gemma4.folder / "config.json").read_text())["vision_config"]
    unclipped = VisionConfig.from_hf(config | {"use_clipped_linears": False}, 40)
    _, abstract = abstract_module(
        lambda rngs: VisionTower(unclipped, dtype=jnp.dtype("float32"), rngs=rngs)
    )
    with pytest.raises(WeightsError, match=f"unexpected: {name}"):
        import_params(weight_rules(unclipped, path=()), tower.store, abstract, ignore=NOT_VISUAL)


def test_unpack_puts_patches_in_merge_block_order():
    """4 x 6 patches in blocks of 2 x 2; each holds its row and column."""
    made = invent(4, 6, padded=32)
    y, x = np.divmod(np.arange(24), 6)
    made["pixel_values"][0, :24, 0], made["pixel_values"][0, :24, 1] = y, x
    patches, rows, columns = unpack(made, 2)
    assert (rows, columns, patches.dtype, patches.shape) == (4, 6, np.float32, (24, 48))
    np.testing.assert_array_equal(patches[:12, 0], [0, 0, 1, 1] * 3)
    np.testing.assert_array_equal(patches[:12, 1], [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5])
    np.testing.assert_array_equal(patches[12:, 0], patches[:12, 0] + 2)
    np.testing.assert_array_equal(patches[12:, 1], patches[:12, 1])


@pytest.mark.parametrize("grid", [(4, 5), (3, 4), (0, 0)])
def test_unpack_refuses_partial_blocks(grid):
    with pytest.raises(ValueError, match="no whole grid"):
        unpack(invent(*grid, padded=24), 2)


def test_unpack_refuses_holes_and_several_images():
    made = invent(4, 6)
    two = {name: np.concatenate([value] * 2) for name, value in made.items()}
    with pytest.raises(ValueError, match="expected one image"):
        unpack(two, 2)
    made["image_position_ids"][0, 7] = -1
    with pytest.raises(ValueError, match="no whole grid"):
        unpack(made, 2)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"hidden_activation": "gelu"}, ["hidden_activation", "gelu"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads", "1", "3"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_type", "yarn"]),
        ({"use_clipped_linears": "yes"}, ["use_clipped_linears", "yes"]),
        ({"head_dim": 6}, ["head_dim", "6"]),
        ({"pooling_kernel_size": None}, ["pooling_kernel_size"]),
    ],
)
def test_config_refuses_what_it_cannot_do(gemma4, change, names):
    config = json.loads((gemma4.folder / "config.json").read_text())["vision_config"]
    with pytest.raises(ConfigError) as error:
        VisionConfig.from_hf(config | change, 40)
    assert all(name in str(error.value) for name in names)
