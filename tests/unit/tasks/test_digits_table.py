import numpy as np
import pytest

from lmm_r1.tasks.digits import scan, scan_indices
from lmm_r1.tasks.digits_table import DigitsTableTask, asked_digits

TASK = DigitsTableTask()
TABLE = ((1, 2, 3), (4, 5, 6), (7, 8, 9))


def make(modality, *, split="train", rows=60, seed=0, task=TASK):
    return list(task.generate(split=split, modality=modality, rows=rows, seed=seed))


def text_of(row):
    content = row.messages[0]["content"]
    return content if isinstance(content, str) else content[1]["text"]


def place_in(text):
    return [int(word.strip(",?")) for word in text.split() if word.strip(",?").isdigit()]


def test_a_question_is_about_a_cell_a_row_or_a_column_counted_from_1():
    assert asked_digits(TABLE, question="cell", row=2, column=3) == (6,)
    assert asked_digits(TABLE, question="row", row=3, column=1) == (7, 8, 9)
    assert asked_digits(TABLE, question="column", row=3, column=1) == (1, 4, 7)


@pytest.mark.parametrize("modality", ["text", "image"])
def test_the_answer_of_every_row_follows_from_its_table_and_its_prompt(modality):
    kinds = set()
    for row in make(modality):
        table = row.columns["table"]
        question = row.datasource.rpartition("_")[2]
        numbers = place_in(text_of(row).splitlines()[-1])
        column = [digits[numbers[-1] - 1] for digits in table]
        if question == "cell":
            expected = column[numbers[0] - 1]
        else:
            expected = sum(table[numbers[0] - 1]) if question == "row" else sum(column)
        assert row.answer == str(expected)
        assert row.solution.endswith(f"<answer>{expected}</answer>")
        kinds.add(question)
    assert kinds == {"cell", "row", "column"}


def test_a_text_row_shows_its_table():
    for row in make("text", rows=10):
        assert [[*map(int, line.split())] for line in text_of(row).splitlines()[:-1]] == row.columns["table"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_cell_of_a_picture_holds_a_scan_of_its_digit_from_the_split(split):
    for row in make("image", split=split, rows=4):
        pixels = np.asarray(row.messages[0]["content"][0]["image"])
        assert pixels.shape == (84, 84)
        for line, digits in enumerate(row.columns["table"]):
            for column, digit in enumerate(digits):
                cell = pixels[line * 28 : line * 28 + 28, column * 28 : column * 28 + 28]
                sizes = range(22, 27)
                drawn = [
                    np.asarray(scan(index).resize((size, size), 3))
                    for index in scan_indices(split)[digit]
                    for size in sizes
                ]
                margins = [(28 - image.shape[0]) // 2 for image in drawn]
                assert any(
                    np.array_equal(cell[margin : margin + len(image), margin : margin + len(image)], image)
                    for margin, image in zip(margins, drawn, strict=True)
                )


def test_rows_are_those_of_their_seed():
    assert make("mixed", rows=4, seed=3) == make("mixed", rows=8, seed=3)[:4]
    assert make("mixed", rows=4, seed=3) != make("mixed", rows=4, seed=4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"cells": 1}, "a table of 1 x 1 cells: 2 to 9"), ({"cell_px": 20}, "cells of 20 px hold no digit of 26 px")],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        DigitsTableTask(**settings)
