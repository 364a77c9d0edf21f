"""Rows that were once read wrongly without a word: each file of tests/data/cases is read right, or refused by line."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmm_r1.data.files import read_row_file
from lmm_r1.data.formats import FORMATS
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.images import check_image_exists, load_image
from lmm_r1.data.messages import ImagePart, Message, TextPart, demonstration
from lmm_r1.data.reading import RowReading
from lmm_r1.errors import UserError

CASES = Path(__file__).resolve().parents[2] / "data" / "cases"


def written(tmp_path: Path, *rows: dict) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def texts(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(one.role, "".join(part.text for part in one.parts if isinstance(part, TextPart))) for one in messages]


def test_a_worked_answer_is_no_prefill_without_the_placeholder_of_r1_vlm():
    file = read_row_file(str(CASES / "F01_r1vlm_null_image.jsonl"))
    assert [row.prefill for row in file.rows.values()] == ["", "", "", ""]
    assert [texts(row.messages) for row in file.rows.values()][1:] == [
        [("user", "2+2?")],
        [("user", "3+3?")],
        [("user", "4+4?")],
    ]
    assert file.summary_as_prompts.endswith("; the worked answers of 4 are not part of the prompts")
    # As SFT learns them, they are whole.
    assert texts(demonstration(file.rows[1]).messages) == [("user", "2+2?"), ("assistant", "It is \\boxed{4}")]


def test_every_command_says_how_many_rows_begin_the_response(tmp_path):
    rows = written(
        tmp_path,
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It"}], "answer": "4"},
        {"messages": [{"role": "user", "content": "1+2?"}], "answer": "3"},
    )
    file = read_row_file(rows, reading=RowReading(format="r1_vlm"))
    assert [row.prefill for row in file.rows.values()] == ["It", ""]
    assert file.summary.endswith("rows in the format r1_vlm (r1_vlm); 1 of them begin the response (prefill)")


def test_the_answer_of_an_addition_is_the_sum_and_not_the_list_of_digits(tmp_path):
    asked = {"messages": [{"role": "user", "content": "?"}], "image": None, "label": [1, 7], "total": 8}
    rows = read_row_file(written(tmp_path, {**asked, "task": "addition"}, {**asked, "task": "recognition"})).rows
    assert [row.answer for row in rows.values()] == ["8", "[1, 7]"]


CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "answer": "4"},
        {"message": json.dumps(CHAT), "answer": "4"},
        {"messages": CHAT, "image": None, "answer": "4"},
        {"problem": "2+2?", "answer": "4"},
        {"problem": "2+2?", "solution": "4"},
        {"problem": "2+2?", "solution": "4", "images": None},
        {"index": "1", "question": "2+2?", "image": None, "answer": "4"},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "image": None},
        {"prompt": "2+2?", "response": "4"},
    ],
)
def test_every_format_puts_system_before_the_prompt_and_refuses_history(row, tmp_path):
    surrounded = {**row, "system": "Add."}
    [read] = read_row_file(written(tmp_path, surrounded)).rows.values()
    assert texts(read.messages) == [("system", "Add."), ("user", "2+2?")]
    for name, value in {"tools": [{"name": "crop"}], "history": [["1+1?", "2"]]}.items():
        with pytest.raises(UserError, match=f'rows.jsonl line 1: the field "{name}" is not read'):
            read_row_file(written(tmp_path, {**row, name: value}))


def test_a_system_turn_is_not_doubled_and_two_of_them_are_refused(tmp_path):
    begun = [{"role": "system", "content": "Add."}, *CHAT]
    [row] = read_row_file(written(tmp_path, {"messages": begun, "system": "Add.", "answer": "4"})).rows.values()
    assert texts(row.messages) == [("system", "Add."), ("user", "2+2?")]
    with pytest.raises(UserError, match="line 1: the messages begin with a system turn"):
        read_row_file(written(tmp_path, {"messages": begun, "answer": "4", "system": "Subtract."}))


def test_sixteen_bits_in_a_pgm_keep_their_shades(tmp_path):
    part = ImagePart(str(CASES / "F03_mode_I_16bit.pgm"))
    check_image_exists(part, location="rows line 1")
    values = np.asarray(Image.open(CASES / "F03_mode_I_16bit.pgm"))
    assert (values.min(), values.max()) == (0, 65535)
    shades = np.asarray(load_image(part, location="rows line 1"))
    np.testing.assert_array_equal(shades, np.repeat((values // 256).astype(np.uint8)[..., None], 3, axis=-1))


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "32-bit integers"), (np.float32, "floats")])
def test_images_of_an_unknown_range_are_refused_when_rows_are_read_and_when_they_are_shown(dtype, kind, tmp_path):
    file = tmp_path / "depth.tiff"
    Image.fromarray(np.array([[0, 1], [2, 3]], dtype=dtype)).save(file)
    told = f"cannot read the image {file}: its pixels are {kind}, whose range is unknown; store it with 8 or 16 bits"
    row = {"problem": "<image>How deep?", "images": [file.name], "answer": "3"}
    for read in (
        lambda: read_row_file(written(tmp_path, row)),
        lambda: load_image(ImagePart(file.read_bytes()), location="rows line 1"),
    ):
        with pytest.raises(UserError) as raised:
            read()
        assert f"its pixels are {kind}" in str(raised.value)
    with pytest.raises(UserError) as raised:
        load_image(ImagePart(str(file)), location="rows line 1")
    assert told in str(raised.value)


def test_formats_that_no_training_needs_are_not_decoded(tmp_path):
    file = tmp_path / "picture.png"
    Image.new("RGB", (4, 4)).save(file, format="PCX")
    with pytest.raises(UserError, match="it has none of the formats PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM"):
        load_image(ImagePart(str(file)), location="rows line 1")


def test_empty_entries_are_no_images():
    rows = read_row_file(str(CASES / "F08_empty_image_entries.jsonl")).rows
    images = [sum(isinstance(part, ImagePart) for part in row.messages[0].parts) for row in rows.values()]
    assert images == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("empty", [None, "", {"bytes": None, "path": None}, {"bytes": b"", "path": ""}, float("nan")])
@pytest.mark.parametrize("column", ["image", "images"])
def test_no_format_takes_an_empty_entry_for_an_image(column, empty):
    record = {"problem": "2+2?", "answer": "4", "solution": "4", column: [empty]}
    row = RowReading().row(
        record, row_format=FORMATS["flat"], location="rows line 1", base_dir=CASES, answer_required=True
    )
    assert row.messages[0].parts == (TextPart("2+2?"),)


def test_a_quote_in_a_value_costs_its_line_only():
    file = read_row_file(str(CASES / "F12_quote_first.tsv"), bad_rows="skip")
    assert [row.answer for row in file.rows.values()] == ["A", "C"]
    [skipped] = file.skipped
    assert skipped.index == 1
    assert skipped.reason.startswith(f"{CASES / 'F12_quote_first.tsv'} line 3: not tab-separated values")


def test_a_quote_that_is_never_closed_refuses_the_file(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('problem,answer\n"1+\n1?",2\n"open,3\n2+2?,4\n3+3?,6\n')
    # It has taken all following lines, which are not lost unseen.
    with pytest.raises(UserError, match=f"{file} line 4: not comma-separated values: "):
        read_row_file(str(file), bad_rows="skip")


def test_a_column_that_the_user_names_may_hold_the_empty_entries(tmp_path):
    row = {"question": "2+2?", "answer": "4", "figures": [""]}
    reading = RowReading(names=ColumnNames(prompt="question", images="figures"))
    [read] = read_row_file(written(tmp_path, row), reading=reading).rows.values()
    assert read.messages[0].parts == (TextPart("2+2?"),)
