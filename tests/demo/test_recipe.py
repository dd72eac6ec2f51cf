"""The training network computes what transformers' class does; its solvers are exact."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.demo.recipe.evaluate import shown_images, token_class
from mmflash_jax.demo.recipe.export import write_configuration
from mmflash_jax.demo.recipe.families import FAMILIES, family_of
from mmflash_jax.demo.recipe.family import Family
from mmflash_jax.demo.recipe.optimizer import MuonAdam, orthogonalised
from mmflash_jax.demo.recipe.prompts import SEQUENCE_LENGTH, PromptWriter
from mmflash_jax.demo.recipe.qwen35 import QWEN35
from mmflash_jax.demo.recipe.qwen35_delta_net import unit_lower_inverse
from mmflash_jax.demo.recipe.qwen35_geometry import to_patches
from mmflash_jax.demo.recipe.qwen35_network import Qwen35Network
from mmflash_jax.demo.recipe.qwen35_shape import (
    Qwen35Shape,
    huggingface_config,
    initial_weights,
)
from mmflash_jax.demo.recipe.tokenizer import padded_vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(QWEN35.folder / "tokenizer.json"))


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request) -> Family:
    return request.param


def test_training_network_equals_transformers(tokenizer):
    shape = Qwen35Shape(vocabulary=704)
    writer = PromptWriter(tokenizer, QWEN35.marks, shape.image_tokens)
    weights = initial_weights(shape, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        # Norms and biases start at identity, where mistakes would hide.
        if "norm" in name or name.endswith("bias"):
            weights[name] = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    network = Qwen35Network(
        weights, shape, writer.prefix_length, SEQUENCE_LENGTH, "cpu", torch.float32, False
    )
    reference = Qwen3_5ForConditionalGeneration(huggingface_config(shape, tokenizer))
    reference = reference.float().eval()
    loaded = reference.load_state_dict(network.weights, strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]
    assert not loaded.unexpected_keys
    examples = sample_examples(2, seed=7)
    ids = torch.from_numpy(writer.encode_examples(examples).ids).long()
    images = torch.from_numpy(np.stack([example.image for example in examples]))
    patches = to_patches(images, shape).view(-1, 3, 1, shape.patch, shape.patch)
    patches = patches.expand(-1, -1, shape.temporal_patch, -1, -1).flatten(1)
    with torch.no_grad():
        expected = reference(
            input_ids=ids,
            pixel_values=patches,
            image_grid_thw=torch.tensor([[1, *shape.grid]] * len(examples)),
            mm_token_type_ids=(ids == writer.image_id).int(),
        ).logits
        logits = network.logits(network.text(ids, network.vision(images)))
    difference = (logits - expected).abs().max().item()
    assert difference <= 1e-4 * expected.abs().max().item()


def test_unit_lower_inverse_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    lower = torch.randn(2, 32, 32, generator=generator, dtype=torch.float64).tril(-1) * 0.3
    lower.requires_grad_()
    identity = torch.eye(32, dtype=torch.float64)
    weights = torch.randn(2, 32, 32, generator=generator, dtype=torch.float64)
    inverse = unit_lower_inverse(lower)
    torch.testing.assert_close(inverse, torch.linalg.inv(identity + lower))
    (gradient,) = torch.autograd.grad((inverse * weights).sum(), lower)
    exact = torch.linalg.inv(identity + lower)
    (expected,) = torch.autograd.grad((exact * weights).sum(), lower)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("size", [(2, 40, 64), (2, 64, 40)])
def test_muon_updates_are_nearly_orthogonal(size):
    matrices = torch.randn(size, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalised(matrices, torch.float32))
    assert singular.min() > 0.5
    assert singular.max() < 1.3


def test_optimizer_lowers_a_loss():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 40, generator=generator).requires_grad_()
    bias = torch.randn(40, generator=generator).requires_grad_()
    optimizer = MuonAdam([("matrix", matrix), ("bias", bias)], 0.0, torch.float32)
    optimizer.learning_rate.fill_(0.05)
    losses = []
    for _ in range(80):
        optimizer.clear_gradients()
        loss = (matrix.square().sum() + bias.square().sum()) / 40
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_training_prompt_is_what_the_chat_template_writes(family):
    tokenizer = Tokenizer.from_file(str(family.folder / "tokenizer.json"))
    shape = family.shape(padded_vocabulary(tokenizer))
    writer = PromptWriter(tokenizer, family.marks, shape.image_tokens)
    shipped = AutoTokenizer.from_pretrained(family.folder, local_files_only=True)
    parts = [{"type": "image"}, {"type": "text", "text": "Add FRA and NOR."}]
    text = shipped.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    text = text.replace(family.marks.image_pad, family.marks.picture(shape.image_tokens))
    ids = writer.prompt_ids("Add FRA and NOR.")
    assert ids == shipped(text, add_special_tokens=False).input_ids
    image = slice(writer.prefix_length, writer.prefix_length + shape.image_tokens)
    assert set(ids[image]) == {writer.image_id}
    assert writer.image_id not in ids[: image.start] + ids[image.stop :]


def test_shipped_configuration_is_what_the_script_writes(family, tmp_path):
    tokenizer = Tokenizer.from_file(str(family.folder / "tokenizer.json"))
    shape = family.shape(padded_vocabulary(tokenizer))
    write_configuration(tmp_path, family, shape, tokenizer)
    for path in tmp_path.iterdir():
        assert path.read_text() == (family.folder / path.name).read_text()
    assert family_of(tmp_path) is family


def test_shown_images():
    examples = sample_examples(3, seed=1)
    assert (shown_images(examples, "white") == 255).all()
    assert (shown_images(examples, "grey") == 128).all()
    swapped = shown_images(examples, "swapped")
    np.testing.assert_array_equal(swapped[1], examples[0].image)


@pytest.mark.parametrize(
    ("token", "name"),
    [("7", "digits"), ("A", "letters"), ("Ġis", "other"), ("Ġ", "other"), ("▁", "other")],
)
def test_token_classes(token, name):
    assert token_class(token) == name
