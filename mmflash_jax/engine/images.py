"""Image files to upright RGB pixels, with one clear error for whatever cannot be read.

Files of users are hostile input: the pixel count is checked from the header, before anything is
decoded, and no decoder's own exception leaves this module.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# Four times the largest area the supported towers look at; 200 MB once decoded.
MAX_PIXELS = 2**26
# Transparent pixels become white, the paper of documents and charts.
BACKGROUND = (255, 255, 255)
# Pixel formats only: some of PIL's other readers start programs (EPS) or fetch more files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


class ImageError(ValueError):
    """An image cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class StoredImage:
    """Bytes of an image that stay where they are until the image is opened.

    name: of the image, for errors. read: its bytes.
    """

    name: str
    read: Callable[[], bytes]


Source = str | Path | bytes | Image.Image | StoredImage


def open_image(
    source: Source,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """The upright RGB image in a file, in a file's bytes, wherever they are, or in a PIL image.

    The EXIF orientation is applied. Transparency is composited on white. Sixteen-bit grey is
    scaled to eight bits. Of an animation the first frame is taken. `name` stands for the source
    in errors.

    Raises:
        ImageError: it is missing, no image, truncated, of a pixel format without an RGB meaning
            or larger than `max_pixels`.
    """
    name = name or _name(source)
    if isinstance(source, Image.Image):
        return _upright_rgb(source, name, max_pixels)
    try:
        if isinstance(source, StoredImage):
            source = source.read()
        # PIL meets its own limit in `open`, as a warning or an error depending on the size.
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=FORMATS) as image:
            return _upright_rgb(image, name, max_pixels)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{name}: no such file") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"{name}: more than the {max_pixels} pixels allowed") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}: {_why_unknown(source)}") from None
    except Exception as error:  # Readers raise whatever a broken file makes them stumble on.
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{name}: cannot be read ({reason})") from None


def _name(source: Source) -> str:
    if isinstance(source, StoredImage):
        return source.name
    if isinstance(source, bytes):
        return f"image of {len(source)} bytes"
    return "image" if isinstance(source, Image.Image) else str(source)


def _why_unknown(source: Source) -> str:
    assert isinstance(source, str | Path | bytes)
    size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
    return f"not a readable {', '.join(FORMATS)} file" if size else "is empty (0 bytes)"


def _upright_rgb(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            f"{name}: {width} x {height} is {width * height} pixels, {max_pixels} are allowed"
        )
    if not width * height:
        raise ImageError(f"{name}: {width} x {height} has no pixels")
    try:
        image.load()
        return _flatten(_upright(image))
    except Exception as error:  # As above; `load` decodes.
        raise ImageError(f"{name}: cannot be decoded ({error})") from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Pixels are fine and the metadata is not: show them as they are stored.
        return image


def _flatten(image: Image.Image) -> Image.Image:
    """Any pixel format as RGB on the background."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range")
    if image.mode.startswith("I"):
        return _eight_bit(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    page = Image.new("RGBA", layer.size, (*BACKGROUND, 255))
    return Image.alpha_composite(page, layer).convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Sixteen-bit grey scaled to RGB; PIL's own conversion would clip everything above 255."""
    wide = np.asarray(image).astype(np.int64)
    grey = ((np.clip(wide, 0, 65535) * 255 + 32767) // 65535).astype(np.uint8)
    pixels = np.repeat(grey[..., None], 3, axis=-1)
    if isinstance(clear := image.info.get("transparency"), int):
        pixels[wide == clear] = BACKGROUND
    return Image.fromarray(pixels)
