"""Pictures by every way in: the model sees the same pixels, right side up."""

import io

import numpy as np
import pytest
from PIL import Image

from mmflash_jax.compilation import compiled_programs
from mmflash_jax.engine.prompts import Request
from tests.server.conftest import CHARTS

CHART = Image.open(CHARTS[0]).convert("RGB")


def view(served, *images, text="What?"):
    """What the model makes of the pictures: first tokens and how sure it is of them."""
    got = served.chat(text, *images, max_tokens=4, logprobs=True)
    content = got.choices[0].logprobs.content
    return [entry.token for entry in content], [entry.logprob for entry in content]


def assert_same_view(one, two):
    assert one[0] == two[0]
    np.testing.assert_allclose(one[1], two[1], atol=1e-4)


def assert_other_view(one, two):
    assert one[0] != two[0] or not np.allclose(one[1], two[1], atol=1e-3)


def stored(image, **options):
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("orientation", "stored_as"),
    [
        (3, Image.Transpose.ROTATE_180),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_90),
        (8, Image.Transpose.ROTATE_270),
    ],
)
def test_photos_are_upright(served, orientation, stored_as):
    """B07: stored turned, with a note how to turn it back."""
    turned, exif = CHART.transpose(stored_as), Image.Exif()
    exif[0x0112] = orientation
    upright = view(served, CHART)
    assert_same_view(view(served, stored(turned, exif=exif)), upright)
    assert_other_view(view(served, turned), upright)


def test_transparent_pictures_lie_on_white(served):
    """B08, B17: hidden colours do not show; the same by file and by data URL."""
    clear = Image.new("RGBA", CHART.size, (255, 0, 0, 0))
    white = view(served, Image.new("RGB", CHART.size, (255, 255, 255)))
    assert_same_view(view(served, clear), white)
    (served.site.images.root / "clear.png").write_bytes(stored(clear))
    by_file = view(served, f"file://{served.site.images.root}/clear.png")
    assert_same_view(by_file, white)
    assert_other_view(view(served, clear.convert("RGB")), white)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "I;16", "RGBA"])
def test_every_pixel_format_is_answered(served, mode):
    """B08: no format crashes."""
    if mode == "I;16":
        image = Image.fromarray(np.asarray(CHART.convert("L")).astype(np.uint16) * 257)
    else:
        image = CHART.convert("RGBA").convert(mode) if mode == "LA" else CHART.convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    stream = io.BytesIO()
    image.save(stream, kind)
    assert len(view(served, stream.getvalue())[0]) >= 1


SIZES = [
    (1, 1), (2, 2), (27, 257), (161, 184), (333, 1001), (57, 999), (16, 16), (640, 480),
    (100, 300), (1200, 90), (200, 201), (512, 512),
]  # fmt: skip


def test_twelve_sizes_compile_nothing_and_count_their_tokens(served):
    """B09, B12, C13."""
    view(served, CHART)
    before = compiled_programs()
    counts = set()
    for size in SIZES:
        image = CHART.resize(size)
        prompt = served.session.encoder.encode(Request(text="What?", images=(image,)))
        got = served.chat("What?", image, max_tokens=1)
        assert got.usage.prompt_tokens_details.image_tokens == prompt.images[0].num_tokens
        assert got.usage.prompt_tokens == len(prompt.ids)
        counts.add(prompt.images[0].num_tokens)
    assert len(counts) > 5
    assert compiled_programs() == before


def test_three_pictures_keep_their_order(served):
    """B13: sizes differ; another order is another prompt."""
    images = [CHART, CHART.resize((200, 90)), Image.open(CHARTS[1]).convert("RGB")]
    prompt = served.session.encoder.encode(
        Request(text="Which?", images=tuple(images), max_tokens=12)
    )
    (ids,) = served.plain([prompt])
    got = served.chat("Which?", *images, max_tokens=12)
    assert got.choices[0].message.content == served.session.encoder.decode(ids)
    total = sum(image.num_tokens for image in prompt.images)
    assert got.usage.prompt_tokens_details.image_tokens == total
    assert_other_view(view(served, *images), view(served, *images[::-1]))


def test_the_same_question_about_another_picture(served):
    """C01: two pictures, swapped and swapped back; nothing is remembered."""
    answers = [
        served.chat("Which country is highest?", CHARTS[index]).choices[0].message.content
        for index in (0, 1, 0, 1)
    ]
    assert answers[0] == answers[2] != answers[1] == answers[3]
