"""Where an image of a request comes from: a path, a data URL, base64, or bytes as they are."""

import base64
import binascii
import re
import reprlib
from pathlib import Path
from typing import Any

from mmflash_jax.engine.images import ImageError

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
# How base64 of PNG, JPEG, GIF, WEBP, TIFF and BMP begins. Shorter text is a path: no image is as
# small, and a path of that many such letters and no dot would have to begin like one.
_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUkqA|TU0AK|Qk)[A-Za-z0-9+/\s]{52,}={0,2}\s*")


def image_source(value: Any, folder: Path) -> Path | bytes:
    """A file, relative to `folder`, or the encoded bytes that `value` holds.

    `value` is a path, a data URL, base64, bytes, or a struct of `bytes` and `path` as Hugging Face
    data sets store images: its bytes if there are any, else its path.

    Raises:
        ImageError: an address on the network, damaged base64, or none of these.
    """
    if isinstance(value, dict) and {"bytes", "path"} & set(value):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ImageError(
            f"images holds {reprlib.repr(value)}, expected file names, data URLs, base64 or bytes"
        )
    if value[:5].lower() == "data:":
        return read_data_url(value)
    if _BASE64.fullmatch(value):
        return _decode(value, value)
    if scheme := _URL.match(value):
        raise ImageError(
            f"{value[:80]!r} is a {scheme[1].lower()} address, and prompts are read without a "
            "network; fetch the image and give its path, a data URL or its bytes"
        )
    return folder / value


def read_data_url(url: str) -> bytes:
    """The bytes of `data:image/png;base64,...`.

    Raises:
        ImageError: it holds something else than an image, or no base64.
    """
    head, comma, body = url.partition(",")
    kind, *parameters = head[len("data:") :].split(";")
    if not comma or "base64" not in parameters:
        raise ImageError(f"{reprlib.repr(url)}: a data URL must read data:image/png;base64,...")
    if kind and not kind.lower().startswith("image/"):
        raise ImageError(f"{reprlib.repr(url)}: a data URL of {kind}, expected an image")
    return _decode(body, url)


def _decode(text: str, shown: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{reprlib.repr(shown)}: not valid base64 ({error})") from None
