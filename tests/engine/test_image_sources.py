"""Paths, data URLs, base64 and bytes; addresses on the network are refused."""

import base64
from pathlib import Path

import pytest

from mmflash_jax.engine.image_sources import image_source
from mmflash_jax.engine.images import ImageError

FOLDER = Path("somewhere")
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(60))
TEXT = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("sub/a.png", FOLDER / "sub/a.png"),
        ("/9j/a.jpg", Path("/9j/a.jpg")),
        ("iVBORw0KGgo" + "a" * 80 + ".png", FOLDER / ("iVBORw0KGgo" + "a" * 80 + ".png")),
        (PNG, PNG),
        (TEXT, PNG),
        (TEXT[:30] + "\n" + TEXT[30:], PNG),
        (f"data:image/png;base64,{TEXT}", PNG),
        (f"DATA:;base64,{TEXT}", PNG),
        ({"bytes": PNG, "path": "a.png"}, PNG),
        ({"bytes": None, "path": "a.png"}, FOLDER / "a.png"),
        ({"path": "a.png"}, FOLDER / "a.png"),
    ],
)
def test_where_an_image_comes_from(value, source):
    assert image_source(value, FOLDER) == source


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://a.b/c.png", "'https://a.b/c.png' is a https address, and prompts are read with"),
        ("s3://bucket/c.png", "is a s3 address"),
        ("data:image/png,abc", "a data URL must read data:image/png;base64,..."),
        ("data:text/plain;base64,YWJj", "a data URL of text/plain, expected an image"),
        ("data:image/png;base64,?", "not valid base64"),
        (3, "images holds 3, expected file names"),
        ("", "images holds '', expected"),
        ({"bytes": None, "path": None}, "images holds None, expected"),
        ({"file": "a.png"}, "images holds {'file': 'a.png'}, expected"),
    ],
)
def test_what_is_no_image(value, message):
    with pytest.raises(ImageError) as error:
        image_source(value, FOLDER)
    assert message in str(error.value)
