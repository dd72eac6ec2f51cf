"""Ablated pictures: what goes, what stays, and what randomness depends on."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmflash_jax.engine.prompts import Request
from mmflash_jax.training.ablation import ablate, parameters
from mmflash_jax.weights.hf_config import ConfigError

KEEP_SIZE = ("blank", "patchmask", "pixelate", "noise")
RANDOM = ("patchmask", "noise")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(1, 255, (height, width, 3), np.uint8))


def request(*images: Any, id: str = "a", **fields: Any) -> Request:
    return Request(id=id, text="What is it?", images=images, **fields)


def pixels(made: Request) -> list[np.ndarray]:
    return [np.asarray(image) for image in made.images]


@pytest.mark.parametrize("kind", KEEP_SIZE)
def test_every_picture_changes_and_keeps_its_size(kind):
    before = request(picture(50, 33), picture(20, 70, seed=1), max_tokens=9, stop=("x",))
    after = ablate(before, kind, 0)
    assert [made.shape for made in pixels(after)] == [(33, 50, 3), (70, 20, 3)]
    assert all((a != b).any() for a, b in zip(pixels(before), pixels(after), strict=True))
    assert (after.text, after.max_tokens, after.stop) == (before.text, 9, ("x",))


def test_blank_is_mid_grey_from_any_source():
    file = io.BytesIO()
    picture(9, 5).convert("RGBA").save(file, "PNG")
    (made,) = pixels(ablate(request(file.getvalue()), "blank", 0))
    assert made.shape == (5, 9, 3)
    assert (made == 127).all()


def test_masked_patches_are_whole_and_half_of_them():
    source = picture(330, 250)
    (made,) = pixels(ablate(request(source), "patchmask", 0))
    kept = (made == np.asarray(source)).all(axis=-1)
    black = (made == 0).all(axis=-1)
    assert (kept ^ black).all()
    for patch in range(0, 250, 16):
        band = kept[patch : patch + 16]
        assert (band == band[:1]).all()
    assert 0.4 < black.mean() < 0.6


def test_pixelated_pictures_have_a_tenth_of_the_resolution():
    (made,) = pixels(ablate(request(picture(100, 60)), "pixelate", 0))
    tiles = made.reshape(6, 10, 10, 10, 3)
    assert (tiles == tiles[:, :1, :, :1]).all()
    assert len(np.unique(tiles[:, 0, :, 0].reshape(-1, 3), axis=0)) > 30


@pytest.mark.parametrize("kind", RANDOM)
def test_randomness_follows_from_seed_sample_and_place_alone(kind):
    """Two equal pictures of one sample are ablated differently, one sample always alike."""
    image = picture(64, 64)
    first, second = pixels(ablate(request(image, image), kind, 3))
    again = pixels(ablate(request(image, image), kind, 3))
    assert (first == again[0]).all()
    assert (second == again[1]).all()
    assert (first != second).any()
    assert (first != pixels(ablate(request(image), kind, 4))[0]).any()
    assert (first != pixels(ablate(request(image, id="b"), kind, 3))[0]).any()


def test_text_only_takes_pictures_from_text_and_messages():
    assert ablate(request(picture(8, 8)), "textonly", 0) == Request(id="a", text="What is it?")
    content = [{"type": "text", "text": "Look"}, {"type": "image"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    made = ablate(Request(messages=messages, images=(picture(8, 8),)), "textonly", 0)
    assert made.images == ()
    assert made.messages == [messages[0], {"role": "user", "content": content[:1]}]
    assert len(content) == 2, "the request itself stays"


def test_text_only_needs_text():
    with pytest.raises(ConfigError, match="'textonly', which needs prompts of text"):
        ablate(Request(ids=[1, 2]), "textonly", 0)


def test_parameters_say_what_an_ablation_is():
    assert parameters("blank") == {"value": 127}
    assert parameters("patchmask") == {"patch": 16, "share": 0.5, "value": 0}
    assert parameters("pixelate") == {"ratio": 0.1}
