"""Reading images: every pixel format, orientation, and hostile or broken files."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from mmflash_jax.engine.images import MAX_PIXELS, ImageError, open_image

ORIENTATION = 0x0112
WHITE = (255, 255, 255)


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def noise(width, height, channels=3):
    rng = np.random.default_rng(width + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, channels), np.uint8))


def hollow_png(width, height):
    """A valid black one-bit PNG of any size in a few kilobytes."""

    def chunk(kind, data):
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width // 8 + 1) * height))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored = noise(64, 48)
    stored.paste((255, 0, 0), (0, 0, 64, 8))
    upright = open_image(encoded(stored, exif=exif))
    turns = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    turn = turns[orientation]
    expected = stored if turn is None else stored.transpose(turn)
    np.testing.assert_array_equal(np.asarray(upright), np.asarray(expected))
    # A second look must not turn it again.
    np.testing.assert_array_equal(np.asarray(ImageOps.exif_transpose(upright)), np.asarray(upright))


def test_orientation_of_a_jpeg_photo():
    """B07: a photo stored on its side equals the one stored upright."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    photo = Image.new("RGB", (640, 480), "white")
    photo.paste((255, 0, 0), (0, 0, 40, 480))
    upright = open_image(encoded(photo, "JPEG", exif=exif))
    assert upright.size == (480, 640)
    assert np.abs(np.asarray(upright)[5, 240].astype(int) - (255, 0, 0)).max() < 8


def test_broken_metadata_does_not_hide_the_picture():
    broken = b"Exif\x00\x00" + b"\xff" * 40
    assert open_image(encoded(Image.new("RGB", (8, 8), "red"), "JPEG", exif=broken)).size == (8, 8)


def paletted(transparent):
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    return encoded(image, transparency=0) if transparent else encoded(image)


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        (encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0))), WHITE),
        (encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 255))), (255, 0, 0)),
        (encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 51))), (204, 204, 204)),
        (encoded(Image.new("LA", (4, 4), (90, 0))), WHITE),
        (encoded(Image.new("LA", (4, 4), (90, 255))), (90, 90, 90)),
        (encoded(Image.new("L", (4, 4), 90)), (90, 90, 90)),
        (encoded(Image.new("1", (4, 4), 1)), WHITE),
        (paletted(transparent=False), (255, 0, 0)),
        (paletted(transparent=True), WHITE),
        (encoded(Image.new("RGB", (4, 4), (9, 8, 7)), transparency=(9, 8, 7)), WHITE),
        (encoded(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
        (encoded(Image.new("I;16", (4, 4), 65535)), WHITE),
        (encoded(Image.new("I;16", (4, 4), 257 * 90)), (90, 90, 90)),
        (encoded(Image.new("I", (4, 4), 257 * 90), "TIFF"), (90, 90, 90)),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value)[:24],
)  # fmt: skip
def test_every_pixel_format_becomes_rgb_on_white(data, colour):
    """B08: alpha, palettes, one bit, CMYK and sixteen bits; what is transparent shows white."""
    image = open_image(data)
    assert (image.mode, image.size) == ("RGB", (4, 4))
    assert image.getpixel((1, 2)) == colour


def test_sixteen_bit_grey_with_a_transparent_value():
    image = Image.fromarray(np.array([[0, 1000, 65535]], np.uint16))
    made = np.asarray(open_image(encoded(image, transparency=1000)))
    np.testing.assert_array_equal(made[0, :, 0], [0, 255, 255])


def test_file_bytes_and_pil_image_agree(tmp_path):
    picture = noise(20, 30, channels=4)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture))
    expected = np.asarray(open_image(path))
    for source in (str(path), path.read_bytes(), picture):
        np.testing.assert_array_equal(np.asarray(open_image(source)), expected)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "empty"),
        (b"hello, no image here", "not a readable PNG"),
        (encoded(noise(90, 90), "JPEG")[:900], "truncated"),
        (encoded(noise(90, 90))[:5000], "cannot be decoded"),
        (encoded(noise(90, 90))[:20], "Truncated"),
        (encoded(Image.new("F", (4, 4)), "TIFF"), "floating-point"),
        (encoded(Image.new("RGB", (40, 40)), "EPS"), "not a readable PNG"),
        (hollow_png(20000, 20000), "pixels"),
        (hollow_png(8193, 8192), f"8193 x 8192 is 67117056 pixels, {MAX_PIXELS} are allowed"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value)[:24],
)  # fmt: skip
def test_unusable_files_name_the_file_and_the_cause(tmp_path, data, cause):
    path = tmp_path / "given.png"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"given\.png: ") as error:
        open_image(path)
    message = str(error.value)
    assert cause in message
    assert "\n" not in message
    with pytest.raises(ImageError, match="picture 3"):
        open_image(data, name="picture 3")


def test_paths_that_hold_no_file(tmp_path):
    with pytest.raises(ImageError, match=r"gone\.png: no such file"):
        open_image(tmp_path / "gone.png")
    with pytest.raises(ImageError, match="cannot be read"):
        open_image(tmp_path)
    with pytest.raises(ImageError, match="cannot be read"):
        open_image("a\0b.png")


def test_a_huge_picture_is_refused_before_it_is_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: decoded.append(self))
    with pytest.raises(ImageError, match="67117056 pixels"):
        open_image(hollow_png(8193, 8192))
    assert not decoded


def test_the_limit_holds_for_pil_images_too():
    with pytest.raises(ImageError, match="10 x 10"):
        open_image(Image.new("RGB", (10, 10)), max_pixels=99)
