"""What is asked can't be read at the first view's resolution, and can in a crop of the picture."""

import functools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from lmm_r1.tasks.visual_search import ASKED, NOISE, TILES, Tile, VisualSearchTask, marks

pytestmark = pytest.mark.unit

# Two cells on a side, so that a thousand pictures are drawn in a second or two.
SMALL = VisualSearchTask(view_px=14, distractors=3)
FILTERS = (Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
NO_NOISE = np.zeros((14, 14, 1), dtype=np.int16)
DIGITS = "0123456789"


def make(modality, *, split="train", rows=20, seed=0, task=SMALL):
    return list(task.generate(split=split, modality=modality, rows=rows, seed=seed))


def target_of(row, task=SMALL):
    left, top, _, _ = row.columns["box"]
    colour = re.search(r"the (\w+) tile", row.messages[0]["content"][1]["text"])[1]
    return Tile(colour=colour, value=row.answer, column=left // task.block_px, row=top // task.block_px)


@functools.cache
def template(tile, shrink):
    """The tile's 7x7 pixels at the first view, with those around, where nothing else and no noise is in the picture."""
    return tile_at_first_view(SMALL.draw([tile], noise=NO_NOISE), tile, shrink)


def tile_at_first_view(picture, tile, shrink):
    view = np.asarray(picture.resize((14, 14), shrink)).astype(float)
    return view[tile.row : tile.row + 5, tile.column : tile.column + 5]


def nearest(shown, templates):
    return min(templates, key=lambda value: ((templates[value] - shown) ** 2).sum())


@pytest.fixture(scope="module")
def pictures():
    rows = make("image", rows=1000)
    return [(row.messages[0]["content"][0]["image"], target_of(row)) for row in rows]


@pytest.mark.parametrize("shrink", FILTERS, ids=lambda chosen: chosen.name)
def test_at_the_first_view_the_nearest_digit_is_right_by_chance_only(pictures, shrink):
    right = 0
    for picture, tile in pictures:
        others = {value: template(replace(tile, value=value), shrink) for value in DIGITS}
        right += nearest(tile_at_first_view(picture, tile, shrink), others) == tile.value
    # 1000 draws at 1/10: four standard deviations are 4 * sqrt(1000 * 0.09) = 38.
    assert 62 <= right <= 138


def test_in_the_crop_the_nearest_digit_is_always_right(pictures):
    for picture, tile in pictures:
        left, top, right, bottom = SMALL.crop(tile)
        assert right - left == bottom - top == 90
        crop = np.asarray(picture.crop((left, top, right, bottom))).astype(float)
        # The block in the middle of the tile, with its own brightness taken away.
        row, column = (tile.row + 2) * 9 - top, (tile.column + 2) * 9 - left
        block = crop[row : row + 9, column : column + 9].mean(axis=2)
        assert nearest(block - block.mean(), {value: marks(value) for value in DIGITS}) == tile.value


def test_the_tile_is_found_at_the_first_view(pictures):
    for picture, tile in pictures[:200]:
        view = np.asarray(picture.resize((14, 14), Image.Resampling.BOX)).astype(float)
        colours = np.array(list(TILES.values()))
        # Noise is grey: colours are compared without their brightness.
        chroma = view - view.mean(axis=2, keepdims=True)
        gaps = ((chroma[:, :, None] - (colours - colours.mean(axis=1, keepdims=True))) ** 2).sum(axis=3)
        is_target = (gaps.argmin(axis=2) == list(TILES).index(tile.colour)) & (np.abs(chroma).max(axis=2) > 12)
        rows, columns = np.nonzero(is_target)
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (
            tile.row,
            tile.row + 4,
            tile.column,
            tile.column + 4,
        )


@pytest.mark.parametrize("symbol", ["1", "8", "W"])
def test_ink_and_plate_add_up_to_nothing(symbol):
    added = marks(symbol)
    assert added.shape == (9, 9)
    assert added.sum() == 0
    # A one has 10 dots of ink: 480 over 71 dots of the plate is -6 or -7.
    if symbol == "1":
        assert (added == 48).sum() == 10
        assert set(np.unique(added)) == {-7, -6, 48}


def test_no_pixel_is_clipped():
    low, high = min(map(min, TILES.values())), max(map(max, TILES.values()))
    plates = [int(marks(symbol).min()) for symbol in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    assert low - NOISE + min(plates) >= 0
    assert high + NOISE + 48 <= 255


def test_the_default_picture_is_1008_pixels_square_and_asks_for_112():
    row = make("image", rows=1, task=VisualSearchTask())[0]
    picture, text = row.messages[0]["content"]
    assert picture["image"].size == (1008, 1008)
    assert picture["max_pixels"] == 112 * 112
    assert re.fullmatch(r"Which digit is on the \w+ tile\?", text["text"])
    left, top, right, bottom = row.columns["crop"]
    box = row.columns["box"]
    assert (right - left, bottom - top) == (112, 112)
    assert left <= box[0] < box[2] <= right
    assert top <= box[1] < box[3] <= bottom
    assert 0 <= min(left, top) <= max(right, bottom) <= 1008


def test_larger_blocks_make_larger_digits():
    task = VisualSearchTask(view_px=14, block_px=27, distractors=0)
    row = make("image", rows=1, task=task)[0]
    tile = target_of(row, task)
    pixels = np.asarray(row.messages[0]["content"][0]["image"]).astype(int)
    top, left = (tile.row + 2) * 27, (tile.column + 2) * 27
    block = pixels[top : top + 27, left : left + 27, 0]
    assert np.array_equal(block[::3, ::3], block[1::3, 2::3])
    assert np.array_equal(block[::3, ::3] - block[0, 0], marks(tile.value) - marks(tile.value)[0, 0])


@pytest.mark.parametrize("asked", ASKED)
def test_one_tile_has_the_colour_asked_about(asked):
    task = VisualSearchTask(asked=asked, distractors=20)
    for row in make("text", task=task):
        tiles = [
            tile.split() for tile in row.messages[0]["content"].removeprefix("Tiles: ").partition(".")[0].split(", ")
        ]
        colour = re.search(r"the (\w+) tile", row.messages[0]["content"])[1]
        assert len(tiles) == 21
        assert [value for name, value in tiles if name == colour] == [row.answer]
        assert row.columns == {}


def test_rows_are_those_of_their_seed_and_splits_share_no_place_with_its_answer():
    assert make("mixed", rows=4, seed=3) == make("mixed", rows=8, seed=3)[:4]
    assert make("mixed", rows=4, seed=3) != make("mixed", rows=4, seed=4)
    placed = {
        split: {
            (tile.colour, tile.value, tile.row // 7, tile.column // 7)
            for tile in (target_of(row) for row in make("image", split=split, rows=200))
        }
        for split in ("train", "test")
    }
    assert not placed["train"] & placed["test"]


def test_noise_is_even_and_grey():
    noise = SMALL.noise(random.Random(0))
    assert noise.shape == (14, 14, 1)
    assert noise.min() >= -24
    assert noise.max() <= 24
    assert len(np.unique(noise)) > 40


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"view_px": 13}, "view_px 13: at least 14"),
        ({"block_px": 10}, "block_px 10: a multiple of 9"),
        ({"distractors": 256}, "256 distractors: a view of 112 px has 256 places"),
        ({"asked": "shape"}, "asked shape: it must be one of digit, letter"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        VisualSearchTask(**settings)
