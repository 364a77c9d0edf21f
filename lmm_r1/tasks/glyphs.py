"""Capital letters, digits and an arrow as 5x7 dots: drawn the same on every machine, whatever fonts it has."""

import functools

import numpy as np
from numpy.typing import NDArray

GLYPH_HEIGHT = 7
GLYPH_WIDTH = 5
ARROW = ">"
_ROWS = {
    "A": ".###. #...# #...# ##### #...# #...# #...#",
    "B": "####. #...# #...# ####. #...# #...# ####.",
    "C": ".###. #...# #.... #.... #.... #...# .###.",
    "D": "####. #...# #...# #...# #...# #...# ####.",
    "E": "##### #.... #.... ####. #.... #.... #####",
    "F": "##### #.... #.... ####. #.... #.... #....",
    "G": ".###. #...# #.... #.### #...# #...# .###.",
    "H": "#...# #...# #...# ##### #...# #...# #...#",
    "I": ".###. ..#.. ..#.. ..#.. ..#.. ..#.. .###.",
    "J": "..### ...#. ...#. ...#. ...#. #..#. .##..",
    "K": "#...# #..#. #.#.. ##... #.#.. #..#. #...#",
    "L": "#.... #.... #.... #.... #.... #.... #####",
    "M": "#...# ##.## #.#.# #.#.# #...# #...# #...#",
    "N": "#...# ##..# ##..# #.#.# #..## #..## #...#",
    "O": ".###. #...# #...# #...# #...# #...# .###.",
    "P": "####. #...# #...# ####. #.... #.... #....",
    "Q": ".###. #...# #...# #...# #.#.# #..#. .##.#",
    "R": "####. #...# #...# ####. #.#.. #..#. #...#",
    "S": ".#### #.... #.... .###. ....# ....# ####.",
    "T": "##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# #...# #...# .###.",
    "V": "#...# #...# #...# #...# #...# .#.#. ..#..",
    "W": "#...# #...# #...# #.#.# #.#.# ##.## #...#",
    "X": "#...# #...# .#.#. ..#.. .#.#. #...# #...#",
    "Y": "#...# #...# .#.#. ..#.. ..#.. ..#.. ..#..",
    "Z": "##### ....# ...#. ..#.. .#... #.... #####",
    "0": ".###. #...# #..## #.#.# ##..# #...# .###.",
    "1": "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    "2": ".###. #...# ....# ...#. ..#.. .#... #####",
    "3": ".###. #...# ....# ..##. ....# #...# .###.",
    "4": "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "5": "##### #.... ####. ....# ....# #...# .###.",
    "6": "..##. .#... #.... ####. #...# #...# .###.",
    "7": "##### ....# ...#. ..#.. .#... .#... .#...",
    "8": ".###. #...# #...# .###. #...# #...# .###.",
    "9": ".###. #...# #...# .#### ....# ...#. .##..",
    ARROW: "..... ..#.. ...#. ##### ...#. ..#.. .....",
}
SYMBOLS = tuple(_ROWS)


@functools.cache
def glyph(symbol: str) -> NDArray[np.bool_]:
    """Where one of `SYMBOLS` has ink, `(7, 5)`."""
    dots = np.array([[dot == "#" for dot in row] for row in _ROWS[symbol].split()])
    dots.setflags(write=False)
    return dots


def text_width(text: str) -> int:
    """How many dots wide a text is, with one between two symbols."""
    return len(text) * (GLYPH_WIDTH + 1) - 1


def draw_text(page: NDArray[np.uint8], text: str, *, left: int, top: int, dot_px: int, ink: int) -> None:
    """Write on a page `(height, width)` in place, `dot_px` square pixels for each dot; it must fit."""
    for place, symbol in enumerate(text):
        dots = glyph(symbol).repeat(dot_px, axis=0).repeat(dot_px, axis=1)
        start = left + place * (GLYPH_WIDTH + 1) * dot_px
        cell = page[top : top + dots.shape[0], start : start + dots.shape[1]]
        cell[dots] = ink
