"""The Gemma 4 folder's files load offline with transformers' own classes and fit each other."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.demo.recipe.gemma4 import GEMMA4

FOLDER = GEMMA4.folder


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def processor():
    return AutoImageProcessor.from_pretrained(FOLDER, backend="pil", local_files_only=True)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


def test_the_configuration_is_spelled_as_checkpoints_are_and_loads(config):
    assert config["text_config"]["global_head_dim"] == 64
    assert "per_layer_config" not in config["text_config"]
    assert config["audio_config"] is None
    loaded = AutoConfig.from_pretrained(FOLDER, local_files_only=True)
    widths = [loaded.text_config.per_layer_config[layer].head_dim for layer in range(8)]
    assert widths == [32, 32, 64, 32, 32, 64, 32, 64]
    assert loaded.audio_config is None


def test_every_sort_of_layer_comes_before_the_layers_that_share(config):
    text = config["text_config"]
    own = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    assert set(text["layer_types"][:own]) == set(text["layer_types"])
    assert text["layer_types"][-1] == "full_attention"


def test_special_tokens_agree_with_the_configuration(tokenizer, config):
    for field, token in {
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "audio_token_id": "<|audio|>",
        "boa_token_id": "<|audio>",
        "eoa_token_index": "<audio|>",
        "video_token_id": "<|video|>",
    }.items():
        assert config[field] == tokenizer.convert_tokens_to_ids(token)
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == names
    assert (tokenizer.pad_token, tokenizer.mask_token) == ("<pad>", "<mask>")
    assert tokenizer.image_token == "<|image|>"
    rows = config["text_config"]["vocab_size"]
    assert rows == config["text_config"]["vocab_size_per_layer_input"]
    assert rows % 64 == 0
    assert len(tokenizer) <= rows


def test_stop_ids(tokenizer):
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    names = tokenizer.convert_ids_to_tokens(generation["eos_token_id"])
    assert names == ["<eos>", "<turn|>", "<|tool_response>"]


@pytest.mark.parametrize(
    "text", ["Zürich café — 日本 €5\n  x", "def f(x):\n\treturn x", " FRA 120"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_labels_and_numbers_are_spelled_out(tokenizer):
    pieces = tokenizer.tokenize("FRA reaches 120, then NOR")
    assert pieces[:4] == ["F", "R", "A", "▁reaches"]
    assert [piece for piece in pieces if piece.isdigit()] == ["1", "2", "0"]
    markup = ["<|turn>", "user", "\n", "<|turn>", "model", "\n"]
    assert tokenizer.tokenize("".join(markup)) == markup


def test_chat_template_writes_images_inline_and_trims(tokenizer):
    parts = [{"type": "image"}, {"type": "text", "text": " Which one is on top? "}]
    messages = [{"role": "user", "content": parts}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == ("<bos><|turn>user\n<|image|>Which one is on top?<turn|>\n<|turn>model\n")


@pytest.mark.parametrize(
    ("system", "start"),
    [
        ([], "<|think|>\n"),
        ([{"role": "system", "content": " Be brief. "}], "<|think|>\nBe brief."),
    ],
)
def test_chat_template_with_history_and_thinking(tokenizer, system, start):
    messages = [
        *system,
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "<|channel>thought\nhm\n<channel|>Hello"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=True, tokenize=False
    )
    assert prompt == (
        f"<bos><|turn>system\n{start}<turn|>\n<|turn>user\nHi<turn|>\n"
        "<|turn>model\nHello<turn|>\n<|turn>user\nAnd now?<turn|>\n<|turn>model\n"
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "system", "content": [{"type": "image"}]},
        {"role": "user", "content": [{"type": "audio"}]},
    ],
)
def test_chat_template_refuses_what_it_does_not_know(tokenizer, message):
    with pytest.raises(Exception, match=r"role|Images|part"):
        tokenizer.apply_chat_template([message], tokenize=False)


def test_a_demo_chart_gives_seventy_image_tokens_unresized(processor):
    image = sample_examples(1, seed=2)[0].image
    inputs = processor(images=[Image.fromarray(image)], return_tensors="np")
    assert list(inputs["num_soft_tokens_per_image"]) == [70]
    positions = np.asarray(inputs["image_position_ids"])[0]
    assert positions.min() == 0
    assert positions.max(0).tolist() == [19, 13]
    patches = np.asarray(inputs["pixel_values"])[0].reshape(14, 20, 8, 8, 3)
    pixels = patches.transpose(0, 2, 1, 3, 4).reshape(112, 160, 3)
    np.testing.assert_allclose(pixels, image / 255, atol=1e-6)


@pytest.mark.parametrize("size", [(40, 30), (1280, 720), (300, 200), (1000, 20)])
def test_any_picture_fits_the_processor_and_the_position_table(processor, config, size):
    inputs = processor(images=[Image.new("RGB", size)], return_tensors="np")
    assert 1 <= int(inputs["num_soft_tokens_per_image"][0]) <= 70
    table = config["vision_config"]["position_embedding_size"]
    assert np.asarray(inputs["image_position_ids"]).max() < table
