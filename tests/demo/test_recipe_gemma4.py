"""Gemma 4: the training network computes what transformers' class does, and the tower can learn."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Gemma4ForConditionalGeneration

from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.demo.recipe.export import write_weights
from mmflash_jax.demo.recipe.gemma4 import GEMMA4
from mmflash_jax.demo.recipe.gemma4_geometry import patch_positions, to_patches
from mmflash_jax.demo.recipe.gemma4_network import Gemma4Network
from mmflash_jax.demo.recipe.gemma4_shape import (
    CLIP_NAMES,
    Gemma4Shape,
    huggingface_config,
    initial_weights,
)
from mmflash_jax.demo.recipe.glyphs import GlyphNamer
from mmflash_jax.demo.recipe.network import TEXT_PREFIX
from mmflash_jax.demo.recipe.optimizer import MuonAdam
from mmflash_jax.demo.recipe.prompts import SEQUENCE_LENGTH, PromptWriter
from mmflash_jax.demo.recipe.tokenizer import padded_vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(GEMMA4.folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def shape(tokenizer) -> Gemma4Shape:
    return Gemma4Shape(padded_vocabulary(tokenizer))


def make_network(shape: Gemma4Shape, weights: dict[str, torch.Tensor], prefix_length: int = 5):
    return Gemma4Network(
        weights, shape, prefix_length, SEQUENCE_LENGTH, "cpu", torch.float32, False
    )


def without_identities(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Norms, scalars and clip bounds away from where they do nothing and mistakes would hide."""
    generator = torch.Generator().manual_seed(1)
    changed = {}
    for name, weight in weights.items():
        noise = torch.rand(weight.shape, generator=generator)
        if "norm" in name:
            changed[name] = weight * (0.6 + 0.8 * noise)
        elif name.endswith("layer_scalar"):
            changed[name] = 0.5 + 0.4 * noise
        elif name.endswith(CLIP_NAMES):
            changed[name] = weight.sign() * (0.8 + 0.4 * noise)
        else:
            changed[name] = weight
    return changed


def test_training_network_equals_transformers(tokenizer, shape):
    writer = PromptWriter(tokenizer, GEMMA4.marks, shape.image_tokens)
    weights = without_identities(initial_weights(shape, seed=0))
    network = make_network(shape, weights, writer.prefix_length)
    reference = Gemma4ForConditionalGeneration(huggingface_config(shape, tokenizer))
    reference = reference.float().eval()
    loaded = reference.load_state_dict(network.state(), strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]
    assert not loaded.unexpected_keys
    examples = sample_examples(2, seed=7)
    ids = torch.from_numpy(writer.encode_examples(examples).ids).long()
    images = torch.from_numpy(np.stack([example.image for example in examples]))
    with torch.no_grad():
        expected = reference(
            input_ids=ids,
            # The class scales pixels itself.
            pixel_values=to_patches(images, shape) / 2 + 0.5,
            image_position_ids=patch_positions(shape)[None].expand(len(examples), -1, -1),
            mm_token_type_ids=(ids == writer.image_id).int(),
        ).logits
        logits = network.logits(network.text(ids, network.vision(images)))
        blank = network.logits(
            network.text(ids, network.vision(images.new_full(images.shape, 255)))
        )
    scale = expected.abs().max().item()
    assert (logits - expected).abs().max().item() <= 1e-4 * scale
    assert (blank - expected).abs().max().item() > 0.01 * scale


def test_only_what_is_trained_takes_a_gradient_and_all_is_stored(shape, tmp_path):
    network = make_network(shape, initial_weights(shape, seed=0))
    assert len(network.constants) == 4 * 7 * shape.vision_layers
    ids = torch.randint(20, 700, (1, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(0))
    images = torch.zeros(1, shape.image_height, shape.image_width, 3, dtype=torch.uint8)
    network.logits(network.text(ids, network.vision(images))).square().mean().backward()
    assert all(weight.grad is not None for weight in network.weights.values())
    scalars = [name for name in network.weights if name.endswith("layer_scalar")]
    assert len(scalars) == shape.layers
    write_weights(tmp_path, network.state(), GEMMA4.float32_suffixes)
    assert (tmp_path / "model.safetensors").stat().st_size < 10_000_000


def test_tables_are_not_for_muon(shape):
    network = make_network(shape, initial_weights(shape, seed=0))
    optimizer = MuonAdam([*network.weights.items()], 0.0, torch.float32)
    tables = [weight for name, weight in network.weights.items() if "embed_tokens" in name]
    assert len(tables) == 2
    for table in tables:
        assert any(table is other for other in optimizer.others)
    gate = network.weights[f"{TEXT_PREFIX}layers.0.per_layer_input_gate.weight"]
    assert any(gate is matrix for group in optimizer.matrices.values() for matrix in group)


def test_the_tower_starts_to_name_glyphs(shape):
    """Pooling comes before any projection, so the tower must mark which patch held which glyph."""
    torch.manual_seed(0)
    network = make_network(shape, initial_weights(shape, seed=0))
    namer = GlyphNamer(shape, "cpu", torch.float32, seed=1)
    named = [
        (name, weight)
        for name, weight in network.weights.items()
        if name.startswith(GEMMA4.vision_prefixes)
    ]
    optimizer = MuonAdam([*named, ("glyph_head", namer.head)], 0.0, torch.float32)
    optimizer.learning_rate.fill_(3e-3)
    losses = []
    for _ in range(12):
        optimizer.clear_gradients()
        pictures, codes = namer.random_pictures(4)
        loss, _ = namer.loss(network.vision(pictures), codes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
