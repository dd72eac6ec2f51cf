"""Prompt encoding against transformers' own processor and position rule, and its refusals."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from mmflash_jax.engine.images import ImageError
from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request
from mmflash_jax.targets.qwen3_5 import Qwen35
from tests import tiny

# (width, height): sizes of public reports, the smallest, and one above the tiny limits.
SIZES = [(161, 184), (333, 1001), (57, 999), (1, 1), (2, 2), (27, 257), (3, 40), (640, 480)]


# What a caller may send and the annotations forbid.
NO_MESSAGES: Any = ["Hi"]
NO_IDS: Any = [1.5]


@pytest.fixture(scope="module")
def target(qwen35):
    return Qwen35.from_hf(json.loads((qwen35.folder / "config.json").read_text()), "float32")


@pytest.fixture(scope="module")
def encoder(qwen35, target):
    return PromptEncoder.from_checkpoint(qwen35.folder, target)


def picture(width, height):
    rng = np.random.default_rng(width * 7 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def parts(*items):
    """A user message: strings are text, None is an image."""
    content = [
        {"type": "image"} if item is None else {"type": "text", "text": item} for item in items
    ]
    return [{"role": "user", "content": content}]


def by_transformers(qwen35, encoder, messages, images):
    """Ids, positions, shift and patches of the library's own route."""
    # The processor's own constructor wants a video processor, which wants torchvision.
    processor = object.__new__(Qwen3VLProcessor)
    processor.image_processor = AutoImageProcessor.from_pretrained(qwen35.folder, backend="pil")
    processor.tokenizer = AutoTokenizer.from_pretrained(qwen35.folder)
    processor.image_token = "<|image_pad|>"
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    inputs = {}
    if images:
        inputs = processor.image_processor(images=list(images), return_tensors="pt")
        replacements = iter(
            [processor.replace_image_token(inputs, index) for index in range(len(images))]
        )
        text = re.sub(re.escape(processor.image_token), lambda _: next(replacements), text)
    ids = torch.tensor([processor.tokenizer(text, add_special_tokens=False)["input_ids"]])
    positions, shift = qwen35.model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == tiny.IMAGE_PAD_ID).int(),
        image_grid_thw=inputs.get("image_grid_thw"),
    )
    patches = inputs["pixel_values"].numpy() if images else None
    return ids[0].numpy(), positions[:, 0].numpy(), int(shift), patches


CHATS = {
    "text only": (parts("What now?"), []),
    "image first": (parts(None, "What is it?"), [picture(150, 100)]),
    "image only": (parts(None), [picture(64, 64)]),
    "adjacent images": (parts(None, None, "Compare."), [picture(64, 128), picture(128, 64)]),
    "three images between text": (
        parts("First", None, "second", None, "third", None, "which?"),
        [picture(161, 184), picture(57, 999), picture(1, 1)],
    ),
    "turns": (
        [
            {"role": "system", "content": "  Be short. "},
            *parts(None, "Hm?"),
            {"role": "assistant", "content": "Red ďábelské 👩‍👩‍👧."},
            *parts("And this?", None),
        ],
        [picture(90, 70), picture(70, 90)],
    ),
}


@pytest.mark.parametrize("chat", CHATS)
def test_prompt_equals_transformers(qwen35, encoder, chat):
    messages, images = CHATS[chat]
    prompt = encoder.encode(Request(messages=messages, images=images, max_tokens=7))
    ids, positions, shift, patches = by_transformers(qwen35, encoder, messages, images)
    np.testing.assert_array_equal(prompt.ids, ids)
    np.testing.assert_array_equal(prompt.positions, positions)
    assert (prompt.rope_shift, prompt.max_tokens) == (shift, 7)
    assert (prompt.ids.dtype, prompt.media_idx.dtype) == (np.int32, np.int32)
    if images:
        ours = np.concatenate([image.patches for image in prompt.images])
        np.testing.assert_array_equal(ours, patches)


def test_text_and_images_are_one_user_message(encoder):
    images = [picture(64, 64), picture(96, 64)]
    short = encoder.encode(Request(text="Which is wider?", images=images))
    long = encoder.encode(Request(messages=parts(None, None, "Which is wider?"), images=images))
    np.testing.assert_array_equal(short.ids, long.ids)


@pytest.mark.parametrize("limits", [tiny.SMALL_IMAGES, tiny.FAMILY_IMAGES])
def test_tokens_inserted_equal_feature_rows_at_every_size(qwen35, target, tmp_path, limits):
    (tmp_path / "config.json").write_text((qwen35.folder / "config.json").read_text())
    tiny.write_front_end(tmp_path, size=limits)
    encoder = PromptEncoder.from_checkpoint(tmp_path, target)
    for width, height in SIZES:
        prompt = encoder.encode(Request(text="?", images=[picture(width, height)]))
        counted = encoder.image_processor.get_number_of_image_patches(height, width, {}) // 4
        image = prompt.images[0]
        inserted = int((prompt.ids == tiny.IMAGE_PAD_ID).sum())
        assert inserted == image.num_tokens == len(image.patches) // 4 == counted, (width, height)
        assert image.rows * image.columns == len(image.patches)
        assert 32**2 * inserted >= limits["shortest_edge"]


def test_spans_of_three_images_keep_their_order(encoder):
    sizes = [(64, 64), (192, 64), (100, 190)]
    images = [picture(*size) for size in sizes]
    prompt = encoder.encode(
        Request(messages=parts("a", None, "bc", None, "def", None, "g"), images=images)
    )
    counts = [image.num_tokens for image in prompt.images]
    assert len(set(counts)) == 3
    is_image = prompt.ids == tiny.IMAGE_PAD_ID
    np.testing.assert_array_equal(prompt.media_idx[is_image], np.arange(sum(counts)))
    assert (prompt.media_idx[~is_image] == -1).all()
    starts = np.flatnonzero(np.diff(np.r_[0, is_image.astype(int)]) == 1)
    ends = np.flatnonzero(np.diff(np.r_[is_image.astype(int), 0]) == -1) + 1
    assert (ends - starts).tolist() == counts
    texts = [encoder.decode(prompt.ids[a:b]) for a, b in zip(ends[:-1], starts[1:], strict=True)]
    assert texts == ["bc", "def"]
    for image, alone in zip(prompt.images, images, strict=True):
        single = encoder.encode(Request(text="x", images=[alone]))
        np.testing.assert_array_equal(image.patches, single.images[0].patches)


def test_ids_may_be_expanded_or_not(encoder):
    images = [picture(64, 64), picture(192, 64)]
    whole = encoder.encode(Request(text="Look.", images=images))
    np.testing.assert_array_equal(
        encoder.encode(Request(ids=whole.ids.tolist(), images=images)).ids, whole.ids
    )
    again = (whole.ids != tiny.IMAGE_PAD_ID) | np.r_[True, np.diff(whole.ids) != 0]
    once = whole.ids[again]
    assert (once == tiny.IMAGE_PAD_ID).sum() == 2
    prompt = encoder.encode(Request(ids=once.tolist(), images=images))
    for field in ("ids", "media_idx", "positions"):
        np.testing.assert_array_equal(getattr(prompt, field), getattr(whole, field))


@pytest.mark.parametrize(
    ("request_", "counts"),
    [
        (Request(messages=parts(None, None, "?"), images=[picture(64, 64)]), (2, 1)),
        (Request(messages=parts("?"), images=[picture(64, 64)]), (0, 1)),
        (Request(messages=parts(None, "?")), (1, 0)),
        (Request(text="I type <|image_pad|> myself"), (1, 0)),
        (Request(text="<|image_pad|> again", images=[picture(64, 64)]), (2, 1)),
        # Typed placeholders must not pass for an expanded image.
        (
            Request(messages=parts("<|image_pad|>" * 4), images=[picture(64, 64)]),
            (4, 1),
        ),
        (Request(ids=[5, 261, 261, 6, 261], images=[picture(64, 64)]), (3, 1)),
    ],
)
def test_placeholders_and_images_must_agree(encoder, request_, counts):
    with pytest.raises(PromptError) as error:
        encoder.encode(request_)
    message = str(error.value)
    assert f"{counts[0]} image placeholders" in message
    assert f"{counts[1]} images" in message


def test_expanded_ids_of_another_size_are_refused(encoder):
    with pytest.raises(PromptError, match="3 placeholders in ids and takes 4 tokens"):
        encoder.encode(Request(ids=[5, 261, 261, 261, 6], images=[picture(64, 64)]))


@pytest.mark.parametrize("bad", [-1, tiny.VOCAB_SIZE, 10**12, 10**30])
def test_ids_outside_the_vocabulary_are_refused(encoder, bad):
    with pytest.raises(PromptError, match=f"{bad} is outside the vocabulary of {tiny.VOCAB_SIZE}"):
        encoder.encode(Request(ids=[1, bad, 2]))


def test_a_placeholder_outside_the_vocabulary_is_allowed(qwen35, target):
    """Media features take its place, so it is never looked up."""
    config = dataclasses.replace(target.config, vocab_size=tiny.IMAGE_PAD_ID)
    other = dataclasses.replace(target, config=config)
    encoder = PromptEncoder.from_checkpoint(qwen35.folder, other)
    image = picture(64, 64)
    prompt = encoder.encode(Request(ids=[1, tiny.IMAGE_PAD_ID, 2], images=[image]))
    assert prompt.media_idx.tolist() == [-1, 0, 1, 2, 3, -1]
    with pytest.raises(PromptError, match="262 is outside"):
        encoder.encode(Request(ids=[262]))


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (Request(), "empty"),
        (Request(text=""), "empty"),
        (Request(text=" \n "), "empty"),
        (Request(messages=[]), "empty"),
        (Request(messages=[{"role": "user", "content": ""}]), "empty"),
        (Request(messages=[{"role": "user", "content": []}]), "empty"),
        (Request(messages=[{"role": "user", "content": None}]), "empty"),
        (Request(messages=[{"role": "user"}]), "empty"),
        (Request(messages=[{"role": "user", "content": ["Hi"]}]), "empty"),
        (Request(messages=NO_MESSAGES), "must be objects"),
        (Request(ids=[]), "no tokens"),
        (Request(ids=NO_IDS), "1.5, expected integers"),
        (Request(messages=[{"role": "system", "content": "Be short."}]), "No user message"),
        (
            Request(
                messages=[
                    {"role": "system", "content": [{"type": "image"}]},
                    {"role": "user", "content": "?"},
                ],
                images=[picture(64, 64)],
            ),
            "Only user messages can hold images",
        ),
        (Request(messages=[{"content": "?"}]), "chat template"),
        (Request(text="?", max_tokens=0), "max_tokens is 0"),
        (Request(text="?", ids=[1]), "not two"),
        (Request(text="?", messages=parts("?")), "not two"),
        (Request(messages=[{"role": "user", "content": [{"type": "video"}]}]), "video"),
        (Request(text="<|video_pad|>"), "video"),
        (Request(text="?", images=[picture(1, 300)]), "aspect ratio"),
    ],
)
def test_requests_that_cannot_be_answered(encoder, request_, cause):
    with pytest.raises(PromptError, match=cause) as error:
        encoder.encode(request_)
    assert "\n" not in str(error.value)


def test_an_image_error_names_the_image(encoder, tmp_path):
    good = picture(64, 64)
    with pytest.raises(ImageError, match=r"gone\.png: no such file"):
        encoder.encode(Request(text="?", images=[good, tmp_path / "gone.png"]))
    with pytest.raises(ImageError, match="image 2: is empty"):
        encoder.encode(Request(text="?", images=[good, b""]))


def test_a_turned_photo_gives_the_prompt_of_the_upright_one(encoder):
    upright = picture(90, 180)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = io.BytesIO()
    upright.transpose(Image.Transpose.ROTATE_90).save(stored, "PNG", exif=exif)
    turned = encoder.encode(Request(text="?", images=[stored.getvalue()]))
    straight = encoder.encode(Request(text="?", images=[upright]))
    np.testing.assert_array_equal(turned.ids, straight.ids)
    np.testing.assert_array_equal(turned.images[0].patches, straight.images[0].patches)


def test_thinking_is_the_templates_own_switch(qwen35, target):
    rendered = {
        thinking: PromptEncoder.from_checkpoint(qwen35.folder, target, thinking=thinking).render(
            Request(text="Hi")
        )
        for thinking in (None, True, False)
    }
    assert rendered[None] == rendered[True]
    assert rendered[True].endswith("<|im_start|>assistant\n<think>\n")
    assert rendered[False].endswith("<think>\n\n</think>\n\n")


def test_decode_drops_special_tokens_and_unused_ids(encoder):
    ids = encoder.tokenizer("né 👩‍👩‍👧<|im_end|>")["input_ids"]
    assert encoder.decode(np.array([*ids, tiny.VOCAB_SIZE - 1])) == "né 👩‍👩‍👧"
    assert encoder.eos_id == tiny.TOKEN_IDS["<|im_end|>"]


def test_token_id(encoder):
    assert encoder.token_id("<|im_start|>") == tiny.TOKEN_IDS["<|im_start|>"]
    with pytest.raises(PromptError, match="no token '<none>'"):
        encoder.token_id("<none>")


def test_processor_and_tower_must_cut_the_same_patches(qwen35, tmp_path):
    config = json.loads((qwen35.folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = 14
    tiny.write_front_end(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = Qwen35.from_hf(config, "float32")
    with pytest.raises(PromptError, match=r"preprocessor_config.json: patch_size is 16.*needs 14"):
        PromptEncoder.from_checkpoint(tmp_path, other)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["torchvision"] = None
import json, pathlib
from PIL import Image
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.targets.qwen3_5 import Qwen35
config = json.loads((pathlib.Path(sys.argv[1]) / "config.json").read_text())
target = Qwen35.from_hf(config, "float32")
encoder = PromptEncoder.from_checkpoint(sys.argv[1], target)
prompt = encoder.encode(Request(text="Hi", images=[Image.new("RGB", (64, 64), "red")]))
print(len(prompt.ids), prompt.images[0].patches.shape, encoder.decode([71, 72]) != "")
"""


def test_nothing_here_needs_torch(qwen35, encoder):
    prompt = encoder.encode(Request(text="Hi", images=[picture(64, 64)]))
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(qwen35.folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.split("\n")[0] == f"{len(prompt.ids)} (16, 1536) True"


def test_a_checkpoint_without_a_template_is_refused(qwen35, target, tmp_path):
    tiny.write_front_end(tmp_path)
    (tmp_path / "config.json").write_text((qwen35.folder / "config.json").read_text())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(PromptError, match="no chat template"):
        PromptEncoder.from_checkpoint(tmp_path, target)
