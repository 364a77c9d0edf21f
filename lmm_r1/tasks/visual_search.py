"""The task `visual_search`: what is on the tile of one colour, in a picture that must be looked at closely to tell.

The picture is `view_px * block_px` square and is first shown at `view_px`: one block of the picture is one pixel then. What is
asked, a digit or a letter, fills no more than one block, and its ink and the plate it stands on have
together the colour of the tile: the pixel that is left of it says nothing. Noise of whole blocks covers what a filter that is
wider than a block carries over to the pixels beside it. A crop that is shown at the picture's own resolution has all of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lmm_r1.tasks.glyphs import GLYPH_HEIGHT, GLYPH_WIDTH, glyph
from lmm_r1.tasks.task import Modality, Split, TaskRow, check_image_share, kind_of_row, split_of

Asked = Literal["digit", "letter"]
ASKED: tuple[Asked, ...] = get_args(Asked)
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
_INK = 48
"""What ink adds to the tile."""
_VALUES: dict[Asked, tuple[str, ...]] = {
    "digit": tuple("0123456789"),
    "letter": tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
}
_PROMPTS: dict[Asked, str] = {
    "digit": "Which digit is on the {tile} tile?",
    "letter": "Which letter is on the {tile} tile?",
}
NOISE = 24
"""Each block is lighter or darker by up to so much."""
CELL_BLOCKS = 7
"""The picture is a grid of cells of so many blocks on a side; one tile lies in a cell."""
TILE_BLOCKS = 5
CLOSE_UP_PX = 14
"""Pixels for a block of a close-up."""
CROP_CELLS = 2
"""The crop of a worked episode has so many cells on a side."""
DOTS = 9
"""The dots on a block's side: 5 x 7 of them hold a glyph."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile: its colour, what is on it, and the block at its upper left corner."""

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

    asked: Asked = "digit"
    """What is on the tiles."""
    view_px: int = 112
    """Pixels on the picture's side as it is first shown; a row asks for no more. A multiple of 28 suits most models."""
    block_px: int = 9
    """Pixels of the picture for one of the first view, a multiple of 9: larger ones make larger digits in crops."""
    distractors: int = 40
    """Tiles of other colours, each with something on it."""
    crop_noise: int = 0
    """Cells by which the crop of a worked episode lies off at most, in each direction: a cold start of it has much to learn."""
    close_up: int = 0
    """Rows show a square of so many blocks with what is asked somewhere in it, 14 pixels for a block, and not the picture: a cold
    start learns to read from them; 0 shows the picture. An even number suits models that round sides to 28 pixels."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have an image, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        check_image_share(self.image_share)
        if self.asked not in ASKED:
            raise ValueError(f"asked {self.asked}: it must be one of {', '.join(ASKED)}")
        if self.view_px < 2 * CELL_BLOCKS:
            raise ValueError(f"view_px {self.view_px}: at least {2 * CELL_BLOCKS} are needed")
        if self.block_px < DOTS or self.block_px % DOTS:
            raise ValueError(f"block_px {self.block_px}: a multiple of {DOTS} is needed")
        if not 0 <= self.close_up <= self.view_px:
            raise ValueError(f"close_up {self.close_up}: the picture has {self.view_px} blocks on a side")
        if self.crop_noise < 0:
            raise ValueError(f"crop_noise {self.crop_noise}: it must not be negative")
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
        return self.view_px // CELL_BLOCKS

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from a random stream of its own."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            rng = random.Random(f"visual_search {split} {kind} {seed} {index}")
            target, others = self._tiles(split=split, rng=rng)
            solution = f"<think>The {target.colour} tile has {target.value}.</think><answer>{target.value}</answer>"
            yield TaskRow(
                messages=[{"role": "user", "content": self._content(kind, target, others, rng=rng)}],
                answer=target.value,
                datasource=f"visual_search_{kind}_{self.asked}",
                solution=solution,
                turns=(
                    (self._call(target, index=index, seed=seed), solution)
                    if kind == "image" and not self.close_up
                    else ()
                ),
                columns={"box": self.box(target), "crop": self.crop(target)} if kind == "image" else {},
            )

    def _call(self, target: Tile, *, index: int, seed: int) -> str:
        """The turn that asks for a crop, in the protocol of the environment `crop`: a square of cells of the picture's grid."""
        # A stream of its own, so that the noise changes nothing else of the rows.
        rng = random.Random(f"visual_search crop {seed} {index}")
        column, row = (self._first_cell(place // CELL_BLOCKS, rng=rng) for place in (target.column, target.row))
        edges = (column, row, column + CROP_CELLS, row + CROP_CELLS)
        box = [round(min(edge * CELL_BLOCKS / self.view_px, 1.0), 4) for edge in edges]
        call = json.dumps({"bbox_2d": box, "source": "original_image"})
        return f"<think>The {target.colour} tile is too small to read.</think><grounding>{call}</grounding>"

    def _first_cell(self, cell: int, *, rng: random.Random) -> int:
        """Where the crop for a tile in this cell begins, along one axis."""
        aligned = cell - cell % CROP_CELLS
        return min(max(aligned + rng.randint(-self.crop_noise, self.crop_noise), 0), self._cells - CROP_CELLS)

    def _tiles(self, *, split: Split, rng: random.Random) -> tuple[Tile, list[Tile]]:
        """The tile that is asked about, and the others, each in a cell of its own."""
        places = [(row, column) for row in range(self._cells) for column in range(self._cells)]
        while True:
            colour, value, (row, column) = rng.choice(list(TILES)), rng.choice(_VALUES[self.asked]), rng.choice(places)
            if split_of(f"search {self.asked} {colour} {value} {row} {column} of {self._cells}") == split:
                break
        free = rng.sample([place for place in places if place != (row, column)], self.distractors)
        colours = [name for name in TILES if name != colour]
        others = [
            self._placed(*place, rng.choice(colours), rng.choice(_VALUES[self.asked]), rng=rng) for place in free
        ]
        return self._placed(row, column, colour, value, rng=rng), others

    def _placed(self, row: int, column: int, colour: str, value: str, *, rng: random.Random) -> Tile:
        slack = CELL_BLOCKS - TILE_BLOCKS
        return Tile(
            colour=colour,
            value=value,
            row=row * CELL_BLOCKS + rng.randint(0, slack),
            column=column * CELL_BLOCKS + rng.randint(0, slack),
        )

    def _content(
        self, kind: Literal["text", "image"], target: Tile, others: list[Tile], *, rng: random.Random
    ) -> str | list[dict[str, Any]]:
        question = _PROMPTS[self.asked].format(tile=target.colour)
        tiles = [target, *others]
        if kind == "text":
            rng.shuffle(tiles)
            return f"Tiles: {', '.join(f'{tile.colour} {tile.value}' for tile in tiles)}. {question}"
        picture = self.draw(tiles, noise=self.noise(rng))
        if self.close_up:
            return [self._close_up(picture, target, rng=rng), {"type": "text", "text": question}]
        shown = {"type": "image", "image": picture, "max_pixels": self.view_px**2}
        return [shown, {"type": "text", "text": question}]

    def _close_up(self, picture: Image.Image, tile: Tile, *, rng: random.Random) -> dict[str, Any]:
        """A square of blocks with the middle of a tile somewhere in it."""
        column, row = (
            min(max(place + TILE_BLOCKS // 2 - rng.randrange(self.close_up), 0), self.view_px - self.close_up)
            for place in (tile.column, tile.row)
        )
        left, top, side = (blocks * self.block_px for blocks in (column, row, self.close_up))
        cut = picture.crop((left, top, left + side, top + side))
        pixels = (CLOSE_UP_PX * self.close_up) ** 2
        return {"type": "image", "image": cut, "min_pixels": pixels, "max_pixels": pixels}

    def box(self, tile: Tile) -> list[int]:
        """Left, top, right and bottom of a tile, in pixels of the picture."""
        left, top, side = tile.column * self.block_px, tile.row * self.block_px, TILE_BLOCKS * self.block_px
        return [left, top, left + side, top + side]

    def crop(self, tile: Tile) -> list[int]:
        """Left, top, right and bottom of a square around a tile: of `view_px` pixels, or of twice the tile's side."""
        left, top, right, bottom = self.box(tile)
        side = max(self.view_px, 2 * TILE_BLOCKS * self.block_px)

        def start(middle: int) -> int:
            return min(max(middle - side // 2, 0), self.side_px - side)

        column, row = start((left + right) // 2), start((top + bottom) // 2)
        return [column, row, column + side, row + side]

    def noise(self, rng: random.Random) -> NDArray[np.int16]:
        """A random brightness of each block, `(view_px, view_px, 1)`."""
        shape = (self.view_px, self.view_px, 1)
        drawn = np.frombuffer(rng.randbytes(self.view_px**2), dtype=np.uint8).reshape(shape)
        return (drawn % (2 * NOISE + 1)).astype(np.int16) - NOISE

    def draw(self, tiles: list[Tile], *, noise: NDArray[np.int16]) -> Image.Image:
        """The picture in RGB, `side_px` square."""
        blocks = np.full((self.view_px, self.view_px, 3), BACKGROUND, dtype=np.int16)
        for tile in tiles:
            blocks[tile.row : tile.row + TILE_BLOCKS, tile.column : tile.column + TILE_BLOCKS] = TILES[tile.colour]
        page = (blocks + noise).repeat(self.block_px, axis=0).repeat(self.block_px, axis=1)
        dot_px = self.block_px // DOTS
        for tile in tiles:
            row, column = tile.row + TILE_BLOCKS // 2, tile.column + TILE_BLOCKS // 2
            top, left = row * self.block_px, column * self.block_px
            mark = marks(tile.value).repeat(dot_px, axis=0).repeat(dot_px, axis=1)
            page[top : top + self.block_px, left : left + self.block_px] += mark[..., None]
        return Image.fromarray(page.astype(np.uint8))


def marks(symbol: str) -> NDArray[np.int16]:
    """What a digit or a letter adds to its block, `(9, 9)`: its ink, and a plate that makes the sum 0."""
    ink = np.zeros((DOTS, DOTS), dtype=bool)
    top, left = (DOTS - GLYPH_HEIGHT) // 2, (DOTS - GLYPH_WIDTH) // 2
    ink[top : top + GLYPH_HEIGHT, left : left + GLYPH_WIDTH] = glyph(symbol)
    plate = int((~ink).sum())
    share, rest = divmod(-_INK * int(ink.sum()), plate)
    added = np.full((DOTS, DOTS), _INK, dtype=np.int16)
    # The first `rest` dots of the plate take one more, so that nothing is left over.
    added[~ink] = share + (np.arange(plate) < rest)
    return added


TASK = VisualSearchTask()
