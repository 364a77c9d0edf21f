"""What every row format must keep to: its sample is told from all others, and becomes the rows that stand here."""

import json
import typing
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.tables import frozen

from lmm_r1.config.shared import FormatName
from lmm_r1.data.files import read_records, read_row_file
from lmm_r1.data.formats import FORMATS, PROMPT_ROWS
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, demonstration, describe, images_of
from lmm_r1.data.reading import RowReading
from lmm_r1.data.training_rows import check_prompt
from lmm_r1.errors import UserError

SAMPLES = Path(__file__).resolve().parents[2] / "datasets" / "samples"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a row of a sample must be, its images written as [file] or [WxH]."""

    turns: tuple[tuple[str, str], ...]
    answer: str
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)
    response: str | None = None
    prefill: str = ""


EXPECTED = {
    name: tuple(Expected(**row) for row in rows) for name, rows in frozen("contracts/row_formats", "rows").items()
}


FORMAT_OF = {"easyr1": "flat", "r1_v": "flat", "mini_o3": "flat", "llava": "sharegpt"}
"""Of samples of other projects, whose rows have no format of their own."""


def sample_of(name: str) -> Path:
    """The one row file of a format's sample."""
    (file,) = (SAMPLES / name).glob("rows.*")
    return file


def written(message: Message | None) -> str | None:
    if message is None:
        return None
    return "".join(
        part.text if isinstance(part, TextPart) else f"[{Path(describe(part.source)).name}]"
        for part in message.parts
        if isinstance(part, TextPart | ImagePart)
    )


def seen(row: Row, *, columns: Collection[str]) -> Expected:
    """Return what a row is, of its columns these."""
    return Expected(
        turns=tuple((message.role, str(written(message))) for message in row.messages),
        answer=row.answer,
        datasource=row.datasource,
        columns={name: row.columns[name] for name in columns},
        response=written(row.response),
        prefill=row.prefill,
    )


def test_every_format_has_its_name_its_sample_and_what_becomes_of_it():
    assert set(typing.get_args(FormatName)) == set(FORMATS) == set(EXPECTED) - set(FORMAT_OF)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_is_told_by_its_columns_and_fits_no_other_format(name):
    columns = {column for fields, _, _ in read_records(str(sample_of(name))) for column in fields}
    row_format = FORMATS[FORMAT_OF.get(name, name)]
    assert [other for other in FORMATS.values() if other.fits(columns)] == [row_format]
    assert PROMPT_ROWS.find(columns, file="f") is row_format
    read = read_row_file(str(sample_of(name)))
    assert read.row_format is row_format
    assert f"{len(EXPECTED[name])} rows in the format {row_format.name} ({row_format.source})" in read.summary


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_becomes_these_rows_found_or_named(name):
    read = read_row_file(str(sample_of(name)))
    pairs = zip(read.rows.values(), EXPECTED[name], strict=True)
    assert tuple(seen(row, columns=one.columns) for row, one in pairs) == EXPECTED[name]
    assert read_row_file(str(sample_of(name)), reading=RowReading(format=FORMAT_OF.get(name, name))).rows == read.rows
    for row in read.rows.values():
        for image in images_of(row.messages):
            assert load_image(image, location=row.location).size == (56, 56)


PROMPT_COLUMNS = ("message", "messages", "problem", "conversations", "question", "prompt", "instruction")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_keeps_every_column_but_those_of_the_prompt_and_its_media(name):
    records = [fields for fields, _, _ in read_records(str(sample_of(name)))]
    for record, row in zip(records, read_row_file(str(sample_of(name))).rows.values(), strict=True):
        shown = {*PROMPT_COLUMNS, "image", "images", "videos"}
        assert dict(row.columns) == {column: value for column, value in record.items() if column not in shown}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_can_be_asked_and_answered(name):
    rows = list(read_row_file(str(sample_of(name))).rows.values())
    for row in rows:
        check_prompt(row)
    file = SAMPLES / "lmm_r1" / "solved.jsonl" if name == "lmm_r1" else sample_of(name)
    shown = [demonstration(row) for row in read_row_file(str(file), answer_required=False).rows.values()]
    assert all(row.messages[-1].role == "assistant" for row in shown)
    assert [row.messages[:-1] for row in shown] == [row.messages for row in rows]


def test_columns_that_fit_two_formats_are_an_error_that_names_both(tmp_path):
    file = tmp_path / "rows.jsonl"
    talk = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    file.write_text(
        json.dumps({"messages": [{"role": "user", "content": "1+1?"}], "answer": "2", "conversations": talk})
    )
    with pytest.raises(UserError) as raised:
        read_row_file(str(file))
    assert str(raised.value) == (
        f"{file}: its columns fit the row formats lmm_r1 (message or messages) and sharegpt (conversations); choose one with "
        "--data.format"
    )
    assert read_row_file(str(file), reading=RowReading(format="lmm_r1")).rows[0].answer == "2"
