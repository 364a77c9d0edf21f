"""What is asked can't be read at the first view's resolution, and can in a crop of the picture."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.tables import table
from PIL import Image

from lmm_r1.agents.tool_environment import box_in_pixels
from lmm_r1.tools.tasks.visual_search import TILES, Tile, VisualSearchTask, marks

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


@pytest.mark.parametrize("symbol", ["1", "8"])
def test_ink_and_plate_add_up_to_nothing(symbol):
    added = marks(symbol)
    assert added.shape == (9, 9)
    assert added.sum() == 0
    # A one has 10 dots of ink: 480 over 71 dots of the plate is -6 or -7.
    if symbol == "1":
        assert (added == 48).sum() == 10
        assert set(np.unique(added)) == {-7, -6, 48}


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


def test_one_tile_has_the_colour_asked_about():
    task = VisualSearchTask(distractors=20)
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


@pytest.mark.parametrize(("settings", "said"), table("tasks/visual_search", "wrong_settings_are_refused"))
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        VisualSearchTask(**settings)


# As the demo has it: eight cells on a side, a crop of two of them shown at 14 pixels a block.
SEARCH = VisualSearchTask(view_px=56, distractors=6)
SHOWN_PX = 196


def called_box(row, task=SEARCH):
    """The pixels of the picture that the worked call names."""
    call = json.loads(re.search(r"<grounding>(.*)</grounding>", row.turns[0])[1])
    assert call["source"] == "original_image"
    return box_in_pixels(call["bbox_2d"], limits=(1.0, 1.0), size=(task.side_px, task.side_px))


def holds(box, tile_box):
    return box[0] <= tile_box[0] and box[1] <= tile_box[1] and tile_box[2] <= box[2] and tile_box[3] <= box[3]


@functools.cache
def upscaled_marks(value):
    page = Image.fromarray((marks(value) + 128).repeat(14, axis=0).repeat(14, axis=1).astype(np.uint8))
    return np.asarray(page.resize((14, 14), Image.Resampling.BOX)).astype(float) - 128


def test_the_worked_episode_asks_for_the_tile_and_its_crop_can_be_read_as_it_is_shown():
    for row in make("image", rows=100, task=SEARCH):
        tile, box = target_of(row, SEARCH), called_box(row)
        assert (box[2] - box[0], box[3] - box[1]) == (126, 126)
        assert holds(box, row.columns["box"])
        picture = row.messages[0]["content"][0]["image"]
        shown = picture.crop(box).resize((SHOWN_PX, SHOWN_PX), Image.Resampling.BICUBIC)
        top, left = (
            14 * (place + 2) - 14 * start // 9 for place, start in ((tile.row, box[1]), (tile.column, box[0]))
        )
        block = np.asarray(shown).astype(float).mean(axis=2)[top : top + 14, left : left + 14]
        assert nearest(block - block.mean(), {value: upscaled_marks(value) for value in DIGITS}) == tile.value
        assert row.turns[1] == row.solution


def test_so_many_of_the_worked_episodes_crop_another_square_and_nothing_else_of_them_changes():
    exact, errant = make("image", rows=400, task=SEARCH), make(
        "image", rows=400, task=replace(SEARCH, crop_errors=0.6)
    )
    assert [(row.messages, row.columns, row.solution) for row in exact[:20]] == [
        (row.messages, row.columns, row.solution) for row in errant[:20]
    ]
    held = sum(holds(called_box(row), row.columns["box"]) for row in errant)
    # 400 draws at 0.4; four standard deviations are 4 * sqrt(400 * 0.24) = 39.
    assert 121 <= held <= 199
    # All squares of the grid, and nothing between them.
    assert {edge % 126 for row in errant for edge in called_box(row)} == {0}
    assert len({tuple(called_box(row)) for row in errant}) == 16


def test_episodes_of_text_have_one_turn():
    assert make("text", rows=1)[0].turns == ()


# As visual_search.sh has it: four squares, one for each token of the first view of most models.
COARSE = VisualSearchTask(view_px=56, cell_blocks=14, distractors=3, style="coarse")


def test_a_coarse_tile_is_covered_with_copies_of_what_is_on_it():
    row = make("image", rows=1, task=COARSE)[0]
    picture, (left, top, right, bottom) = row.messages[0]["content"][0]["image"], row.columns["box"]
    assert (right - left, bottom - top) == (90, 90)
    pixels = np.asarray(picture).astype(float).mean(axis=2)[top:bottom, left:right]
    blocks = pixels.reshape(10, 9, 10, 9).swapaxes(1, 2)
    flat = blocks - blocks.mean(axis=(2, 3), keepdims=True)
    # But for the rounding of a mean of three channels.
    assert np.abs(flat - marks(row.answer, ink=64)).max() < 1


def test_a_worked_crop_of_a_coarse_picture_is_the_square_of_the_tile():
    for row in make("image", rows=50, task=COARSE):
        box = called_box(row, COARSE)
        assert (box[2] - box[0], box[3] - box[1], box[0] % 252, box[1] % 252) == (252, 252, 0, 0)
        assert holds(box, row.columns["box"])
