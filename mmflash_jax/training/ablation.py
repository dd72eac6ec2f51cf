"""Pictures whose content is gone, for asking what an answer owes to them.

All but `textonly` keep the size of a picture, hence its patch grid, the number of its tokens and
every position: content is the only thing that changes, and nothing compiles again.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from mmflash_jax.config_train import Ablation
from mmflash_jax.engine.images import open_image
from mmflash_jax.engine.prompts import Message, Request
from mmflash_jax.weights.hf_config import ConfigError

GREY = 127
PATCH, MASKED_SHARE = 16, 0.5
PIXELATE_RATIO = 0.1

Pixels = np.ndarray
"""uint8 `[height, width, 3]`."""


def ablate(request: Request, kind: Ablation, seed: int) -> Request:
    """The request with the content of all its pictures gone.

    Random kinds follow from `seed`, the request's id and the picture's place in it, so neither the
    order of samples nor their number matters.

    Raises:
        ConfigError: `textonly` for a request of token ids, whose text is not known.
        ImageError: an image cannot be read.
    """
    if kind == "textonly":
        return _without_images(request)
    images = []
    for index, source in enumerate(request.images):
        pixels = np.asarray(open_image(source))
        random = _generator(kind, seed, request.id, index)
        images.append(Image.fromarray(_CHANGES[kind](pixels, random)))
    return dataclasses.replace(request, images=tuple(images))


def parameters(kind: Ablation) -> dict[str, Any]:
    """What else defines an ablation: stored beside the scores, which depend on it."""
    return dict(_PARAMETERS[kind])


def _blank(pixels: Pixels, _: np.random.Generator) -> Pixels:
    return np.full_like(pixels, GREY)


def _patchmask(pixels: Pixels, random: np.random.Generator) -> Pixels:
    height, width = pixels.shape[:2]
    masked = random.random((-(-height // PATCH), -(-width // PATCH))) < MASKED_SHARE
    wide = masked.repeat(PATCH, axis=0).repeat(PATCH, axis=1)[:height, :width]
    return np.where(wide[..., None], np.uint8(0), pixels)


def _pixelate(pixels: Pixels, _: np.random.Generator) -> Pixels:
    image = Image.fromarray(pixels)
    small = [max(1, round(side * PIXELATE_RATIO)) for side in image.size]
    coarse = image.resize((small[0], small[1]), Image.Resampling.BOX)
    return np.asarray(coarse.resize(image.size, Image.Resampling.NEAREST))


def _noise(pixels: Pixels, random: np.random.Generator) -> Pixels:
    return random.integers(0, 256, pixels.shape, np.uint8)


_CHANGES: Mapping[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "blank": _blank,
    "patchmask": _patchmask,
    "pixelate": _pixelate,
    "noise": _noise,
}
_PARAMETERS: Mapping[Ablation, Mapping[str, Any]] = {
    "blank": {"value": GREY},
    "patchmask": {"patch": PATCH, "share": MASKED_SHARE, "value": 0},
    "pixelate": {"ratio": PIXELATE_RATIO},
    "noise": {"pixels": "uniform"},
    "textonly": {},
}


def _generator(kind: str, seed: int, sample: str, image: int) -> np.random.Generator:
    # `hash` of a string differs from process to process.
    digest = hashlib.sha256(repr((kind, seed, sample, image)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def _without_images(request: Request) -> Request:
    if request.ids is not None:
        raise ConfigError("visual.ablation is 'textonly', which needs prompts of text, not of ids")
    messages = request.messages
    if messages is not None:
        messages = [_text_of(message) for message in messages]
    return dataclasses.replace(request, messages=messages, images=())


def _text_of(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    kept = [part for part in content if not (isinstance(part, Mapping) and _is_image(part))]
    return {**message, "content": kept}


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image" or "image" in part
