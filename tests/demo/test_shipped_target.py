"""The shipped folder loads offline with transformers' own classes, and the samples fit it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmflash_jax import demo
from mmflash_jax.demo.corpus import sample_examples

DEMO_DIR = Path(demo.__file__).parent
FOLDER = DEMO_DIR / "qwen35"
PROMPTS = DEMO_DIR / "samples" / "prompts.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


def test_stop_ids_are_both_the_turn_end_and_the_text_end(tokenizer):
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    names = tokenizer.convert_ids_to_tokens(generation["eos_token_id"])
    assert names == ["<|im_end|>", "<|endoftext|>"]


def test_special_tokens_agree_with_the_configuration(tokenizer, config):
    for field, token in {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }.items():
        assert config[field] == tokenizer.convert_tokens_to_ids(token)
    assert tokenizer.mask_token == "<|mask|>"
    assert config["text_config"]["vocab_size"] % 64 == 0
    assert len(tokenizer) <= config["text_config"]["vocab_size"]


@pytest.mark.parametrize(
    "text", ["Zürich café — 日本 €5\n  x", "def f(x):\n\treturn x", " FRA 120"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_labels_and_numbers_are_spelled_out(tokenizer):
    pieces = tokenizer.tokenize("FRA reaches 120, then NOR")
    assert pieces[:3] == ["F", "R", "A"]
    assert [piece for piece in pieces if piece.isdigit()] == ["1", "2", "0"]


def test_answers_have_the_intended_length(tokenizer):
    examples = sample_examples(300, seed=8, held_out=True)
    lengths = [len(tokenizer(example.answer_text).input_ids) for example in examples]
    questions = [len(tokenizer(example.question).input_ids) for example in examples]
    assert 70 < np.mean(lengths) < 100
    # 70 image tokens and 14 of chat markup around the question.
    assert 70 + 14 + max(questions) + max(lengths) <= 240


def test_chat_template_writes_images_and_a_closed_think_block(tokenizer):
    parts = [{"type": "image"}, {"type": "text", "text": "Which one is on top?"}]
    messages = [{"role": "user", "content": parts}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which one is on top?"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_chat_template_with_a_system_turn_history_and_thinking(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
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


def test_a_demo_chart_gives_seventy_image_tokens(config):
    processor = AutoImageProcessor.from_pretrained(FOLDER, backend="pil", local_files_only=True)
    image = sample_examples(1, seed=2)[0].image
    inputs = processor(images=[Image.fromarray(image)], return_tensors="np")
    grid = np.asarray(inputs["image_grid_thw"])
    assert grid.tolist() == [[1, 14, 20]]
    assert grid.prod() // config["vision_config"]["spatial_merge_size"] ** 2 == 70
    # Not resampled: the first patch row of the first patch is the picture's own.
    patch = np.asarray(inputs["pixel_values"])[0].reshape(3, 2, 8, 8)
    expected = image[:8, :8].transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(patch[:, 0], expected, atol=1e-5)


@pytest.mark.parametrize("size", [(40, 30), (1280, 720), (300, 200)])
def test_any_picture_fits_the_processor(size):
    processor = AutoImageProcessor.from_pretrained(FOLDER, backend="pil", local_files_only=True)
    inputs = processor(images=[Image.new("RGB", size)], return_tensors="np")
    tokens = int(np.asarray(inputs["image_grid_thw"]).prod()) // 4
    assert 16 <= tokens <= 280


def test_sample_prompts_are_held_out_charts_of_every_kind():
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len(prompts) == 8
    assert len({prompt["text"] for prompt in prompts}) == 8
    kinds = {prompt["id"].split("_")[0] for prompt in prompts}
    assert kinds == {"bar", "hbar", "line"}
    pool = sample_examples(2000, seed=2014, held_out=True)
    for prompt in prompts:
        assert set(prompt) == {"id", "text", "images", "answer"}
        (name,) = prompt["images"]
        image = np.asarray(Image.open(PROMPTS.parent / name))
        same_question = [example for example in pool if example.question == prompt["text"]]
        nearest = min(same_question, key=lambda example: _distance(example.image, image))
        # Font rendering may differ a little between Pillow builds.
        assert _distance(nearest.image, image) < 3
        assert nearest.answer == prompt["answer"]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(int) - other.astype(int)).mean())
