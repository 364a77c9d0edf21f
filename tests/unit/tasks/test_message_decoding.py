import re

import numpy as np
import pytest

from lmm_r1.errors import UserError
from lmm_r1.tasks import split_of
from lmm_r1.tasks.glyphs import ARROW, SYMBOLS, glyph, text_width
from lmm_r1.tasks.message_decoding import WORDS, MessageDecodingTask

ZOOMED = MessageDecodingTask(tiny_entries=5, zoom=4)


def make(modality, *, split="train", rows=30, seed=0, task=None):
    return list((task or MessageDecodingTask()).generate(split=split, modality=modality, rows=rows, seed=seed))


def read_entry(page, box):
    """The three symbols of an entry, by its box alone."""
    left, top, right, bottom = box
    dot_px = (bottom - top) // 7
    assert (right - left, bottom - top) == (17 * dot_px, 7 * dot_px)
    dots = np.asarray(page)[top:bottom:dot_px, left:right:dot_px] == 0
    cells = [dots[:, start : start + 5] for start in (0, 6, 12)]
    return "".join(next(name for name in SYMBOLS if np.array_equal(glyph(name), cell)) for cell in cells)


def test_glyphs_are_told_apart_and_a_text_has_a_dot_between_two():
    assert len({glyph(symbol).tobytes() for symbol in SYMBOLS}) == len(SYMBOLS) == 37
    assert all(glyph(symbol).shape == (7, 5) for symbol in SYMBOLS)
    assert (text_width("A"), text_width("A>A")) == (5, 17)


def test_words_are_different_and_of_capital_letters():
    assert len(set(WORDS)) == len(WORDS) > 500
    assert all(re.fullmatch("[A-Z]{3,}", word) for word in WORDS)
    held_out = [word for word in WORDS if split_of(f"message {word}") == "test"]
    assert 0.15 < len(held_out) / len(WORDS) < 0.25


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_text_row_is_decoded_by_the_table_it_states(split):
    task = MessageDecodingTask(min_words=1, max_words=3)
    lengths = set()
    for row in make("text", split=split, task=task):
        *entries, question = row.messages[0]["content"].splitlines()
        plain = {entry[0]: entry[-1] for entry in entries}
        assert sorted(plain) == sorted(plain.values()) == [chr(code) for code in range(65, 91)]
        coded = re.search('"(.*?)"', question)[1]
        assert coded == row.columns["coded"]
        words = "".join(plain.get(letter, letter) for letter in coded.split()).split("_")
        assert row.answer == " ".join(words)
        assert all(word in WORDS and split_of(f"message {word}") == split for word in words)
        assert row.solution.endswith(f"</think><answer>{row.answer}</answer>")
        lengths.add(len(words))
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize("task", [MessageDecodingTask(), ZOOMED])
def test_an_image_row_is_decoded_by_its_picture(task):
    for row in make("image", rows=6, task=task):
        picture, _ = row.messages[0]["content"]
        assert picture["image"].size == (280 * task.zoom,) * 2
        assert picture["max_pixels"] == 280**2
        plain = {}
        for code, box in row.columns["boxes"].items():
            entry = read_entry(picture["image"], box)
            assert entry[:2] == f"{code}{ARROW}"
            plain[code] = entry[2]
        assert "".join(plain[letter] for letter in row.columns["coded"].split()) == row.answer


def test_each_message_needs_a_tiny_entry_and_most_need_one_only():
    needed = []
    for row in make("image", rows=40, task=ZOOMED):
        heights = [bottom - top for _, top, _, bottom in row.columns["boxes"].values()]
        # A dot of 1 pixel, or of 2 * 4.
        assert set(heights) <= {7, 56}
        assert heights == sorted(heights)
        needed.append(heights.count(7))
    assert min(needed) == 1
    assert max(needed) <= 3
    assert needed.count(1) >= 24


def test_a_tiny_entry_is_five_grey_pixels_at_the_first_view_and_the_others_are_read_there():
    row = make("image", rows=1, task=ZOOMED)[0]
    picture = row.messages[0]["content"][0]["image"]
    view = picture.resize((280, 280), 4)
    *_, (_, (left, top, right, bottom)) = row.columns["boxes"].items()
    large = np.asarray(picture)[top:bottom:8, left:right:8] < 128
    shown = np.asarray(view.resize(picture.size, 2))[top + 4 : bottom : 8, left + 4 : right : 8] < 128
    assert (large == shown).mean() > 0.9
    left, top, right, bottom = next(iter(row.columns["boxes"].values()))
    assert ((right - left) / 4, (bottom - top) / 4) == (4.25, 1.75)


def test_below_26_letters_messages_are_random_strings():
    task = MessageDecodingTask(letters=3, tiny_entries=3, zoom=4)
    for row in make("image", task=task):
        assert re.fullmatch("[ABC]{1,5}", row.answer)
        assert all(bottom - top == 7 for _, top, _, bottom in row.columns["boxes"].values())
    assert len({row.answer for row in make("text", task=task)}) > 10


def test_rows_are_those_of_their_seed():
    assert make("mixed", rows=4, seed=3) == make("mixed", rows=8, seed=3)[:4]
    assert make("mixed", rows=4, seed=3) != make("mixed", rows=4, seed=4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"letters": 2}, "2 letters: 3 to 26"),
        ({"min_words": 2}, "2 to 1 words"),
        ({"tiny_entries": 27}, "27 tiny entries: the decoder has 26"),
        ({"tiny_entries": 1, "zoom": 3}, "zoom 3: with tiny entries it must be at least 4"),
        ({"view_px": 140}, "view_px 140: 26 entries of 34 x 14 pixels do not fit"),
        ({"dot_px": 0}, "must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        MessageDecodingTask(**settings)


def test_a_split_without_any_string_ends_with_what_to_ask_instead():
    task = MessageDecodingTask(letters=3, longest_string=1)
    # A, B and C: some split has none of them, as the hash has it.
    empty = {"train", "test"} - {split_of(f"message {letter}") for letter in "ABC"}
    assert empty
    with pytest.raises(UserError, match="no string of up to 1 of 3 letters belongs to the split"):
        make("text", split=empty.pop(), rows=1, task=task)
