"""Drawing for the twin tasks: a grey board, a palette, six shapes and text of dots, the same on every machine.

Pillow draws without smoothing. Fonts of a machine and plotting libraries are avoided: their pixels change between
releases, and a plot of matplotlib takes longer than the 5 ms that a row may take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from PIL import Image, ImageDraw

from lmm_r1.tasks.glyphs import GLYPH_HEIGHT, glyph, text_width

Rgb: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float]
# Close to the mean that image processors subtract, as the board of `digits`.
BOARD: Rgb = (124, 124, 124)
COLOURS: dict[str, Rgb] = {
    "red": (230, 20, 20),
    "green": (0, 150, 40),
    "blue": (30, 50, 235),
    "yellow": (250, 230, 0),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
INK = COLOURS["white"]
FAINT: Rgb = (154, 154, 154)
COPPER: Rgb = (196, 110, 60)
GOLD: Rgb = (235, 200, 70)
# Pictures have a palette: their PNG files are written several times faster than those of RGB.
_PALETTE = {colour: index for index, colour in enumerate((BOARD, FAINT, COPPER, GOLD, *COLOURS.values()))}


class Canvas:
    """A picture whose coordinates are independent of its scale."""

    def __init__(self, width: int, height: int, *, scale: int) -> None:
        self.scale = scale
        self.image = Image.new("P", (width * scale, height * scale), _PALETTE[BOARD])
        self.image.putpalette([part for colour in _PALETTE for part in colour])
        self._draw = ImageDraw.Draw(self.image)

    def line(self, points: Sequence[Point], colour: Rgb = INK, *, width: float = 1) -> None:
        self._draw.line(
            self._scaled(points), fill=_PALETTE[colour], width=max(1, round(width * self.scale)), joint="curve"
        )

    def polygon(self, points: Sequence[Point], colour: Rgb) -> None:
        self._draw.polygon(self._scaled(points), fill=_PALETTE[colour])

    def box(self, left: float, top: float, right: float, bottom: float, colour: Rgb) -> None:
        """Draw a rectangle with the edges `right` and `bottom` left out."""
        corners = [self.scale * edge for edge in (left, top, right, bottom)]
        self._draw.rectangle((*corners[:2], corners[2] - 1, corners[3] - 1), fill=_PALETTE[colour])

    def disc(self, centre: Point, radius: float, colour: Rgb) -> None:
        ends = self._scaled([(centre[0] - radius, centre[1] - radius), (centre[0] + radius, centre[1] + radius)])
        self._draw.ellipse(ends, fill=_PALETTE[colour])

    def slice(self, centre: Point, radius: float, start: float, end: float, colour: Rgb) -> None:
        """Draw a sector of a disc; angles are in degrees clockwise from the top."""
        ends = self._scaled([(centre[0] - radius, centre[1] - radius), (centre[0] + radius, centre[1] + radius)])
        self._draw.pieslice(ends, start - 90, end - 90, fill=_PALETTE[colour])

    def text(self, text: str, centre: Point, colour: Rgb = INK, *, dot: int = 1) -> None:
        """Write capitals, digits and signs around a point, each letter 5 x 7 dots."""
        side = dot * self.scale
        mask = _mask(text).resize((text_width(text) * side, GLYPH_HEIGHT * side), Image.Resampling.NEAREST)
        left = round(centre[0] * self.scale - mask.width / 2)
        top = round(centre[1] * self.scale - mask.height / 2)
        self._draw.bitmap((left, top), mask, fill=_PALETTE[colour])

    def _scaled(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self.scale, y * self.scale) for x, y in points]


@functools.lru_cache(maxsize=4096)
def _mask(text: str) -> Image.Image:
    mask = Image.new("L", (text_width(text), GLYPH_HEIGHT))
    for place, symbol in enumerate(text):
        if symbol != " ":
            mask.paste(Image.fromarray(glyph(symbol).astype("uint8") * 255), (place * 6, 0))
    return mask


def on_circle(centre: Point, radius: float, degrees: float) -> Point:
    """Return a point of a circle; the angle is clockwise from the top."""
    angle = math.radians(degrees)
    return centre[0] + radius * math.sin(angle), centre[1] - radius * math.cos(angle)


def _outline(*points: Point) -> Callable[[Canvas, Point, float, Rgb], None]:
    """Return what draws a polygon that is given for a centre of (0, 0) and a radius of 1."""

    def draw(canvas: Canvas, centre: Point, radius: float, colour: Rgb) -> None:
        canvas.polygon([(centre[0] + x * radius, centre[1] + y * radius) for x, y in points], colour)

    return draw


def _disc(canvas: Canvas, centre: Point, radius: float, colour: Rgb) -> None:
    canvas.disc(centre, radius, colour)


_ARM = 0.36
_CORNERS = [(1.0, _ARM), (_ARM, _ARM), (_ARM, 1.0)]
SHAPES: dict[str, Callable[[Canvas, Point, float, Rgb], None]] = {
    "circle": _disc,
    "square": _outline((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "triangle": _outline((0, -1), (1, 0.9), (-1, 0.9)),
    "diamond": _outline((0, -1.1), (0.75, 0), (0, 1.1), (-0.75, 0)),
    "cross": _outline(
        *_CORNERS,
        *[(-x, y) for x, y in reversed(_CORNERS)],
        *[(-x, -y) for x, y in _CORNERS],
        *[(x, -y) for x, y in reversed(_CORNERS)],
    ),
    "star": _outline(*[on_circle((0, 0.1), 1.1 if turn % 2 == 0 else 0.42, 36 * turn) for turn in range(10)]),
}
