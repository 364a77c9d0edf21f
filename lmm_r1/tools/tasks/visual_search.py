"""The task `visual_search`: find what is on the tile of one colour, which is only visible in a closer view of the picture.

The picture is `view_px * block_px` square and is first shown at `view_px`: one block of the picture is one pixel then. The digit
fills no more than one block, and its ink and the plate it stands on have
together the colour of the tile: the pixel that is left of it says nothing. Noise of whole blocks covers what a filter that is
wider than a block carries over to the pixels beside it. A crop that is shown at the picture's own resolution has all of it.

The style `coarse` is easier, for tiny models: a tile is covered with copies of its symbol, and
each square of cells has a background of its own, so that what is around a tile tells its place.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lmm_r1.tools.tasks import Modality, Parts, Split, TaskRow, check_image_share, kind_of_row, split_of

Style = Literal["fine", "coarse"]
STYLES: tuple[Style, ...] = get_args(Style)
Rgb = tuple[int, int, int]
TILES: dict[str, Rgb] = {
    "red": (166, 90, 90),
    "green": (90, 166, 90),
    "blue": (90, 90, 166),
    "yellow": (166, 166, 90),
    "purple": (166, 90, 166),
    "cyan": (90, 166, 166),
}
BACKGROUND: Rgb = (128, 128, 128)
_INK: dict[Style, int] = {"fine": 48, "coarse": 64}
"""What ink adds to the tile."""
# Digits as 5x7 dots: drawn the same on every machine, whatever fonts it has.
_GLYPHS = {
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
}
NOISE = 24
"""Each block is lighter or darker by up to so much."""
CELL_BLOCKS = 7
"""A cell's side is a multiple of this many blocks, of which the tile in it has `TILE_BLOCKS` each."""
TILE_BLOCKS = 5
CROP_CELLS = 2
"""The cells per side of a solution's crop, and of a square with one background."""
_MOST_SQUARES = 4
"""Per side: with more of them, backgrounds would be hard to distinguish."""
_TINT = 60
"""How much redder the squares of the last column are than those of the first, and how much bluer those of the last row."""
DOTS = 9
"""The dots on a block's side: 5 x 7 of them hold a glyph."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile: its colour, its symbol, and the block at its upper left corner."""

    colour: str
    value: str
    column: int
    row: int


@dataclass(frozen=True, kw_only=True)
class VisualSearchTask:
    """One tile of a colour that no other has. Train and test share no place of it with the same colour and answer.

    Each row with an image has the columns `box` (left, top, right and bottom of the tile asked about, in pixels of the
    picture) and `crop` (the same of a crop that has the tile in its middle and can be read).
    """

    view_px: int = 112
    """Pixels on the picture's side as it is first shown; a row asks for no more. A multiple of 28 suits most models."""
    block_px: int = 9
    """Pixels of the picture for one of the first view, a multiple of 9: larger ones make larger digits in crops."""
    distractors: int = 40
    """Tiles of other colours, each with something on it."""
    cell_blocks: int = CELL_BLOCKS
    """Blocks on the side of a cell, a multiple of 7: each cell has one tile, whose side is five sevenths of the cell's."""
    style: Style = "fine"
    """Of a tile that is `fine` the block in its middle has what is asked, on a grey picture; for `coarse`, see above."""
    crop_errors: float = 0.0
    """Share of the worked episodes whose crop is another square of cells, any of them: a cold start of it has much to learn."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have an image, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        check_image_share(self.image_share)
        if self.style not in STYLES:
            raise ValueError(f"style {self.style}: it must be one of {', '.join(STYLES)}")
        if self.cell_blocks < CELL_BLOCKS or self.cell_blocks % CELL_BLOCKS:
            raise ValueError(f"cell_blocks {self.cell_blocks}: a multiple of {CELL_BLOCKS} is needed")
        if self.view_px < CROP_CELLS * self.cell_blocks:
            raise ValueError(f"view_px {self.view_px}: at least {CROP_CELLS * self.cell_blocks} are needed")
        if self.style == "coarse" and self._squares > _MOST_SQUARES:
            raise ValueError(
                f"view_px {self.view_px}: style coarse has at most {_MOST_SQUARES} backgrounds on a side, so "
                f"{_MOST_SQUARES * CROP_CELLS * self.cell_blocks} pixels with --cell_blocks {self.cell_blocks}"
            )
        if self.block_px < DOTS or self.block_px % DOTS:
            raise ValueError(f"block_px {self.block_px}: a multiple of {DOTS} is needed")
        if not 0 <= self.crop_errors <= 1:
            raise ValueError(f"crop_errors {self.crop_errors}: a share from 0 to 1 is needed")
        if self.crop_errors and self._squares == 1:
            raise ValueError(
                f"crop_errors {self.crop_errors}: a view of {self.view_px} px has one square, and no other to crop"
            )
        if not 0 <= self.distractors < self._cells**2:
            raise ValueError(
                f"{self.distractors} distractors: a view of {self.view_px} px has {self._cells**2} places, one of them for the "
                "tile that is asked about"
            )

    @property
    def side_px(self) -> int:
        """Pixels on the picture's side."""
        return self.view_px * self.block_px

    @property
    def _cells(self) -> int:
        return self.view_px // self.cell_blocks

    @property
    def _squares(self) -> int:
        """Squares of `CROP_CELLS` cells on a side of the picture; the last may have fewer."""
        return -(-self._cells // CROP_CELLS)

    @property
    def tile_blocks(self) -> int:
        """Blocks on a tile's side."""
        return self.cell_blocks // CELL_BLOCKS * TILE_BLOCKS

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            rng = random.Random(f"visual_search {split} {kind} {seed} {index}")
            target, others = self._tiles(split=split, rng=rng)
            solution = f"<think>The {target.colour} tile has {target.value}.</think><answer>{target.value}</answer>"
            yield TaskRow(
                messages=[{"role": "user", "content": self._content(kind, target, others, rng=rng)}],
                answer=target.value,
                datasource=f"visual_search_{kind}_digit",
                solution=solution,
                turns=(self._call(target, index=index, seed=seed), solution) if kind == "image" else (),
                columns={"box": self.box(target), "crop": self.crop(target)} if kind == "image" else {},
            )

    def _call(self, target: Tile, *, index: int, seed: int) -> str:
        """The turn that asks for a crop, in the protocol of the environment `crop`: a square of cells of the picture's grid."""
        # Its own random stream, so that an error does not change the other rows.
        rng = random.Random(f"visual_search crop {seed} {index}")
        square = (target.column // self.cell_blocks // CROP_CELLS, target.row // self.cell_blocks // CROP_CELLS)
        if rng.random() < self.crop_errors:
            squares = range(self._squares)
            square = rng.choice([place for place in itertools.product(squares, squares) if place != square])
        # The last square has its full size, too.
        column, row = (min(place * CROP_CELLS, self._cells - CROP_CELLS) for place in square)
        edges = (column, row, column + CROP_CELLS, row + CROP_CELLS)
        box = [round(min(edge * self.cell_blocks / self.view_px, 1.0), 4) for edge in edges]
        call = json.dumps({"bbox_2d": box, "source": "original_image"})
        return f"<think>The {target.colour} tile is too small to read.</think><grounding>{call}</grounding>"

    def _tiles(self, *, split: Split, rng: random.Random) -> tuple[Tile, list[Tile]]:
        """The tile of the question and the others, each in its own cell."""
        places = [(row, column) for row in range(self._cells) for column in range(self._cells)]
        while True:
            colour, value, (row, column) = rng.choice(list(TILES)), rng.choice(list(_GLYPHS)), rng.choice(places)
            if split_of(f"search digit {colour} {value} {row} {column} of {self._cells}") == split:
                break
        free = rng.sample([place for place in places if place != (row, column)], self.distractors)
        colours = [name for name in TILES if name != colour]
        others = [self._placed(*place, rng.choice(colours), rng.choice(list(_GLYPHS)), rng=rng) for place in free]
        return self._placed(row, column, colour, value, rng=rng), others

    def _placed(self, row: int, column: int, colour: str, value: str, *, rng: random.Random) -> Tile:
        slack = self.cell_blocks - self.tile_blocks
        return Tile(
            colour=colour,
            value=value,
            row=row * self.cell_blocks + rng.randint(0, slack),
            column=column * self.cell_blocks + rng.randint(0, slack),
        )

    def _content(
        self, kind: Literal["text", "image"], target: Tile, others: list[Tile], *, rng: random.Random
    ) -> str | Parts:
        question = f"Which digit is on the {target.colour} tile?"
        tiles = [target, *others]
        if kind == "text":
            rng.shuffle(tiles)
            return f"Tiles: {', '.join(f'{tile.colour} {tile.value}' for tile in tiles)}. {question}"
        shown = {"type": "image", "image": self.draw(tiles, noise=self.noise(rng)), "max_pixels": self.view_px**2}
        return [shown, {"type": "text", "text": question}]

    def box(self, tile: Tile) -> list[int]:
        """Left, top, right and bottom of a tile, in pixels of the picture."""
        left, top, side = tile.column * self.block_px, tile.row * self.block_px, self.tile_blocks * self.block_px
        return [left, top, left + side, top + side]

    def crop(self, tile: Tile) -> list[int]:
        """Left, top, right and bottom of a square around a tile: of `view_px` pixels, or of twice the tile's side."""
        left, top, right, bottom = self.box(tile)
        side = max(self.view_px, 2 * self.tile_blocks * self.block_px)

        def start(middle: int) -> int:
            return min(max(middle - side // 2, 0), self.side_px - side)

        column, row = start((left + right) // 2), start((top + bottom) // 2)
        return [column, row, column + side, row + side]

    def noise(self, rng: random.Random) -> NDArray[np.int16]:
        """A random brightness of each block, `(view_px, view_px, 1)`."""
        drawn = np.frombuffer(rng.randbytes(self.view_px**2), dtype=np.uint8).reshape((self.view_px, self.view_px, 1))
        return (drawn % (2 * NOISE + 1)).astype(np.int16) - NOISE

    def draw(self, tiles: list[Tile], *, noise: NDArray[np.int16]) -> Image.Image:
        """The picture in RGB, `side_px` square."""
        blocks = self._background()
        for tile in tiles:
            rows, columns = (slice(place, place + self.tile_blocks) for place in (tile.row, tile.column))
            blocks[rows, columns] = TILES[tile.colour]
        page = (blocks + noise).repeat(self.block_px, axis=0).repeat(self.block_px, axis=1)
        dot_px = self.block_px // DOTS
        # Of a tile's blocks, those that are marked.
        first, count = (0, self.tile_blocks) if self.style == "coarse" else (self.tile_blocks // 2, 1)
        for tile in tiles:
            top, left = ((place + first) * self.block_px for place in (tile.row, tile.column))
            mark = np.tile(
                marks(tile.value, ink=_INK[self.style]).repeat(dot_px, axis=0).repeat(dot_px, axis=1), (count, count)
            )
            page[top : top + len(mark), left : left + len(mark)] += mark[..., None]
        return Image.fromarray(page.astype(np.uint8))

    def _background(self) -> NDArray[np.int16]:
        """The colour of each block without tiles, `(view_px, view_px, 3)`."""
        blocks = np.full((self.view_px, self.view_px, 3), BACKGROUND, dtype=np.int16)
        if self.style == "coarse":
            # Only red encodes the column and only blue the row, so that a linear layer can read both.
            # The rest next to the last square has its colour.
            places = np.minimum(np.arange(self.view_px) // (CROP_CELLS * self.cell_blocks), self._squares - 1)
            tints = np.round(_TINT * (places / max(self._squares - 1, 1) - 0.5)).astype(np.int16)
            blocks[..., 0] += tints[None, :]
            blocks[..., 2] += tints[:, None]
        return blocks


def marks(symbol: str, *, ink: int = _INK["fine"]) -> NDArray[np.int16]:
    """What a digit adds to its block, `(9, 9)`: its ink, and a plate that makes the sum 0."""
    inked = np.zeros((DOTS, DOTS), dtype=bool)
    glyph = np.array([[dot == "#" for dot in row] for row in _GLYPHS[symbol].split()])
    top, left = ((DOTS - side) // 2 for side in glyph.shape)
    inked[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph
    plate = int((~inked).sum())
    share, rest = divmod(-ink * int(inked.sum()), plate)
    added = np.full((DOTS, DOTS), ink, dtype=np.int16)
    # The first `rest` dots of the plate take one more, so that no rest remains.
    added[~inked] = share + (np.arange(plate) < rest)
    return added


TASK = VisualSearchTask()
