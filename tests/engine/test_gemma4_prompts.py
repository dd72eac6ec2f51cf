"""Prompts for Gemma 4: marks around images, the family's image sizes, thinking, audio refused."""

import numpy as np
import pytest

from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request
from mmflash_jax.load import stop_ids
from mmflash_jax.registry import DEMO
from mmflash_jax.targets import TARGETS
from mmflash_jax.weights.hf_config import read_json
from tests.engine.test_prompts import SIZES, parts, picture

FOLDER = DEMO / "gemma4"


@pytest.fixture(scope="module")
def encoder():
    config = read_json(FOLDER / "config.json")
    target = TARGETS["Gemma4ForConditionalGeneration"].from_hf(config, "float32")
    return PromptEncoder.from_checkpoint(FOLDER, target)


def rendered(encoder, messages, counts):
    """Ids of the template's text with every placeholder written as transformers' processor does."""
    text = encoder.render(Request(messages=messages))
    for count in counts:
        text = text.replace("<|image|>", "<|image>" + "<IMAGE>" * count + "<image|>", 1)
    text = text.replace("<IMAGE>", "<|image|>")
    return encoder.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("messages", "sizes"),
    [
        (parts("What now?"), []),
        (parts(None, "What is it?"), [(160, 112)]),
        (parts(None, None, "Compare."), [(64, 128), (128, 64)]),
        (parts("First", None, "then", None, "which?"), [(161, 184), (57, 999)]),
    ],
)
def test_images_stand_between_their_marks(encoder, messages, sizes):
    prompt = encoder.encode(Request(messages=messages, images=[picture(*s) for s in sizes]))
    counts = [image.num_tokens for image in prompt.images]
    assert prompt.ids.tolist() == rendered(encoder, messages, counts)
    assert prompt.ids[0] == encoder.tokenizer.bos_token_id != prompt.ids[1]
    # Positions are plain indices, also inside an image.
    np.testing.assert_array_equal(prompt.positions, np.arange(len(prompt.ids))[None])
    assert prompt.rope_shift == 0


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_tokens_inserted_equal_feature_rows_at_every_size(encoder, width, height):
    """B09: images below one pooled patch are scaled up by the family's own rule."""
    image = picture(width, height)
    prompt = encoder.encode(Request(text="?", images=[image]))
    made = encoder.image_processor(images=[image], return_tensors="np")
    (patched,) = prompt.images
    assert patched.num_tokens == int(made["num_soft_tokens_per_image"][0])
    assert patched.rows * patched.columns == len(patched.patches) == 4 * patched.num_tokens
    assert (prompt.media_idx >= 0).sum() == patched.num_tokens <= 70


def test_a_demo_chart_passes_unresized(encoder):
    image = picture(160, 112)
    (patched,) = encoder.encode(Request(text="?", images=[image])).images
    assert (patched.rows, patched.columns, patched.num_tokens) == (14, 20, 70)
    # The first pooled token is the upper left 2 x 2 patches, each row, column, channel.
    first = np.asarray(image)[:8, :8].reshape(-1) / 255
    np.testing.assert_allclose(patched.patches[0], first, atol=1e-6)
    below = np.asarray(image)[8:16, :8].reshape(-1) / 255
    np.testing.assert_allclose(patched.patches[2], below, atol=1e-6)


def test_ids_may_be_expanded_and_framed_or_not(encoder):
    images = [picture(64, 64), picture(192, 64)]
    whole = encoder.encode(Request(text="Look.", images=images))
    again = encoder.encode(Request(ids=whole.ids.tolist(), images=images))
    np.testing.assert_array_equal(again.ids, whole.ids)
    config = encoder.target.config
    is_image = whole.ids == config.image_token_id
    first = is_image & np.r_[True, ~is_image[:-1]]
    frame = np.isin(whole.ids, [config.boi_token_id, config.eoi_token_id])
    once = whole.ids[(~is_image | first) & ~frame]
    np.testing.assert_array_equal(
        encoder.encode(Request(ids=once.tolist(), images=images)).ids, whole.ids
    )


def test_thinking_is_a_mark_in_the_first_system_turn(encoder):
    thinking = PromptEncoder.from_checkpoint(FOLDER, encoder.target, thinking=True)
    on, off = (one.render(Request(text="Hi")) for one in (thinking, encoder))
    assert on.startswith("<bos><|turn>system\n<|think|>")
    # E2B and E4B open the answer without an empty thought block.
    assert off == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_a_part_that_no_tower_reads_is_refused(encoder, kind):
    with pytest.raises(PromptError, match=f"holds {kind}.*only images are supported"):
        encoder.encode(Request(text=f"Listen: <|{kind}|>"))


def test_every_stop_id_ends_an_answer(encoder):
    names = [encoder.tokenizer.convert_ids_to_tokens(id) for id in stop_ids(FOLDER)]
    assert names == ["<eos>", "<turn|>", "<|tool_response>"]
