"""Draws small bar, horizontal bar and line charts with Pillow, 160x112 pixels.

Style "snapped" puts every character in the middle of its own 8-pixel cell, which is one patch of
the image tower. Style "ordinary" is what a plotting program would give: proportional anti-aliased
text at free pixel positions. Positions below are in cells (column, row) until a character is drawn.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Style = Literal["snapped", "ordinary"]
Kind = Literal["bar", "hbar", "line"]
STYLES: tuple[Style, ...] = ("snapped", "ordinary")
KINDS: tuple[Kind, ...] = ("bar", "hbar", "line")

WIDTH, HEIGHT, CELL = 160, 112, 8
COLUMNS, ROWS = WIDTH // CELL, HEIGHT // CELL
NO_GLYPH = 0  # glyph codes are the character's code point minus 32, so 0 is a space

_FONT_SIZE = 10
_BACKGROUNDS = ((255, 255, 255), (255, 255, 255), (255, 255, 255), (248, 248, 240), (240, 244, 250))
_SERIES_COLOURS = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (23, 190, 207),
)
_INK = (0, 0, 0)


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)


@functools.cache
def glyph(character: str) -> np.ndarray:
    """One character as it is drawn in a cell of a snapped chart: uint8[8, 8], black on white."""
    cell = Image.new("L", (CELL, CELL), 255)
    centre = (CELL // 2, CELL // 2)
    ImageDraw.Draw(cell).text(centre, character, font=_font(), fill=0, anchor="mm")
    return np.asarray(cell)


@dataclass
class _Canvas:
    """Pixels, plus the text of an ordinary chart that waits to be drawn over them."""

    style: Style
    rng: random.Random
    background: tuple[int, int, int]
    pixels: np.ndarray = field(init=False)
    glyph_codes: np.ndarray = field(init=False)
    waiting: list[tuple[str, int, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pixels = np.full((HEIGHT, WIDTH, 3), self.background, np.uint8)
        self.glyph_codes = np.full((ROWS, COLUMNS), NO_GLYPH, np.uint8)

    def write(self, text: str, column: int, row: int, clear: bool = False) -> None:
        """Write `text` from a cell on; `clear` wipes what is behind it."""
        if self.style == "ordinary":
            self.waiting.append((text, column * CELL, row * CELL, clear))
            return
        for offset, character in enumerate(text):
            top, left = row * CELL, (column + offset) * CELL
            cell = self.pixels[top : top + CELL, left : left + CELL]
            if clear:
                cell[:] = self.background
            np.minimum(cell, glyph(character)[..., None], out=cell)
            self.glyph_codes[row, column + offset] = ord(character) - 32

    def jitter(self, most: int) -> int:
        """A random shift in pixels; snapped charts never move."""
        return self.rng.randint(-most, most) if self.style == "ordinary" else 0

    def draw_waiting_text(self) -> None:
        if not self.waiting:
            return
        image = Image.fromarray(self.pixels)
        draw = ImageDraw.Draw(image)
        for text, left, top, clear in self.waiting:
            rightmost = WIDTH - int(draw.textlength(text, font=_font())) - 1
            left = min(max(0, left + self.jitter(3)), rightmost)
            top = min(max(0, top + self.jitter(2)), HEIGHT - 10) - 1
            if clear:
                draw.rectangle(draw.textbbox((left, top), text, font=_font()), fill=self.background)
            draw.text((left, top), text, font=_font(), fill=_INK)
        self.pixels = np.array(image)


def render_chart(
    kind: Kind,
    title: str,
    labels: Sequence[str],
    values: Sequence[int],
    style: Style,
    rng: random.Random,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one chart of three to five entities.

    Returns the picture, uint8[112, 160, 3], and the glyph code of each cell, uint8[14, 20] (all
    zero for an ordinary chart, whose characters belong to no single cell).
    """
    canvas = _Canvas(style, rng, rng.choice(_BACKGROUNDS))
    colours = rng.sample(_SERIES_COLOURS, len(_SERIES_COLOURS))
    if style == "ordinary" and kind != "hbar" and rng.random() < 0.5:
        _draw_gridlines(canvas)
    canvas.write(title, rng.randint(0, max(0, COLUMNS - len(title))), 0)
    if kind == "hbar":
        _draw_horizontal_bars(canvas, labels, values, colours)
    else:
        _draw_columns(canvas, kind, labels, values, colours)
    canvas.draw_waiting_text()
    return canvas.pixels, canvas.glyph_codes


def _draw_gridlines(canvas: _Canvas) -> None:
    first, spacing = canvas.rng.randint(18, 30), canvas.rng.randint(14, 26)
    for top in range(first, 100, spacing):
        canvas.pixels[top] = np.asarray(canvas.background, np.uint8) - 18


def _draw_horizontal_bars(
    canvas: _Canvas, labels: Sequence[str], values: Sequence[int], colours: Sequence[tuple]
) -> None:
    rows_per_bar = {3: 4, 4: 3, 5: 2}[len(values)]
    axis = 26 + canvas.jitter(1)
    thickness = min(rows_per_bar * CELL - 6, 14) - 1
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        row = 2 + index * rows_per_bar
        length = max(2, 100 * value // max(values))
        top = row * CELL + 1
        canvas.pixels[top : top + thickness, axis : axis + length] = colours[index]
        canvas.write(label, 0, row)
        first_free_column = -(-(axis + length) // CELL)
        canvas.write(str(value), min(first_free_column, COLUMNS - len(str(value))), row)
    canvas.pixels[2 * CELL - 2 :, axis - 1] = _INK


def _draw_columns(
    canvas: _Canvas,
    kind: Kind,
    labels: Sequence[str],
    values: Sequence[int],
    colours: Sequence[tuple],
) -> None:
    """Vertical bars or a line: labels in the last row, each value over its bar or point."""
    columns_each = COLUMNS // len(values)
    base = 13 * CELL - 1 - (3 if canvas.style == "ordinary" else 0)
    canvas.pixels[base] = _INK
    centres = [index * columns_each * CELL + 12 for index in range(len(values))]
    if kind == "bar":
        tops = [base - max(2, 74 * value // max(values)) for value in values]
        for centre, top, colour in zip(centres, tops, colours, strict=False):
            left, right = centre - 9 + canvas.jitter(2), centre + 9 + canvas.jitter(2)
            canvas.pixels[top:base, max(0, left) : right] = colour
    else:
        lowest, spread = min(values), max(values) - min(values)
        tops = [base - 6 - 62 * (value - lowest) // max(1, spread) for value in values]
        _draw_line(canvas, list(zip(centres, tops, strict=True)), colours[0])
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        column = index * columns_each
        canvas.write(label, column, ROWS - 1)
        # Without clearing, the line would run through the digits.
        row = max(2, (tops[index] - 1) // CELL - 1)
        canvas.write(str(value), column, row, clear=kind == "line")


def _draw_line(canvas: _Canvas, points: list[tuple[int, int]], colour: tuple) -> None:
    image = Image.fromarray(canvas.pixels)
    draw = ImageDraw.Draw(image)
    draw.line(points, fill=colour, width=1)
    for x, y in points:
        draw.rectangle((x - 1, y - 1, x + 1, y + 1), fill=colour)
    canvas.pixels = np.array(image)
