"""Rows that Python has, as a file that the commands read."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmm_r1.api.settings import is_messages, row_file
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import images_of
from lmm_r1.errors import UserError

QUESTION = {"role": "user", "content": "1 + 1?"}


def test_a_path_is_taken_as_it_is_and_nothing_is_written(tmp_path):
    assert row_file(Path("rows.jsonl"), folder=tmp_path, argument="rows") == "rows.jsonl"
    assert row_file("owner/data", folder=tmp_path, argument="rows") == "owner/data"
    assert list(tmp_path.iterdir()) == []


def test_images_in_memory_and_numbers_of_numpy_come_back_from_the_file(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    picture.save(tmp_path / "picture.png")
    stored = (tmp_path / "picture.png").read_bytes()
    shown = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]}
    rows = [
        {"messages": [shown], "answer": str(np.int64(7)), "box": np.array([1, 2])},
        {"messages": [{"role": "user", "content": "<image> What?"}], "images": [stored], "answer": "8"},
        {"messages": [{"role": "user", "content": "<image> What?"}], "images": [{"bytes": stored}], "answer": "9"},
    ]
    path = row_file(iter(rows), folder=tmp_path, argument="rows")
    read = read_row_file(path).rows
    assert [row.answer for row in read.values()] == ["7", "8", "9"]
    assert read[0].columns["box"] == [1, 2]
    for row in read.values():
        (part,) = images_of(row.messages)
        assert np.array_equal(np.asarray(load_image(part, location="here")), np.asarray(picture))


def test_other_rows_never_take_the_place_of_a_file(tmp_path):
    first, second = (
        row_file([{"messages": [QUESTION], "answer": answer}], folder=tmp_path, argument="rows") for answer in "23"
    )
    assert first != second
    assert json.loads(Path(first).read_text())["answer"] == "2"
    assert row_file([{"messages": [QUESTION], "answer": "2"}], folder=tmp_path, argument="rows") == first


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "eval_rows is empty; give at least one row"),
        ([{"answer": "2"}, "text"], r"eval_rows\[1\] is a str; a row is a mapping"),
        ([{"answer": {1}}], r"eval_rows\[0\]: a set is nothing that a row can hold; a row holds texts"),
    ],
)
def test_what_is_no_row_is_told_with_its_place(rows, told, tmp_path):
    with pytest.raises(UserError, match=f"^{told}"):
        row_file(rows, folder=tmp_path, argument="eval_rows")
    assert list(tmp_path.iterdir()) == []


def test_a_conversation_is_told_from_rows():
    assert is_messages([QUESTION])
    assert not is_messages([{"messages": [QUESTION]}])
    assert not is_messages("rows.jsonl")
    assert not is_messages([])
