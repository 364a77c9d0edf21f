"""What every format of judged responses must keep to: its sample is told by its columns, and becomes the rows that stand here."""

import json
from pathlib import Path

import pytest
from helpers.tables import frozen

from lmm_r1.data.files import read_records
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, TextPart, describe, images_of
from lmm_r1.data.preferences import PREFERENCE, STEPS, JudgedRow, RowKind, read_judged_file
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.errors import UserError

SAMPLES = Path(__file__).resolve().parents[2] / "datasets" / "samples" / "judged"
BY_INPUT = RowReading(names=ColumnNames(prompt="input", answer="value"))
KIND = {kind.name: kind for kind in (PREFERENCE, STEPS)}
SAMPLE_ROWS = {
    name: (
        KIND[sample["kind"]],
        sample["format"],
        RowReading(names=ColumnNames(**sample["columns"])) if "columns" in sample else AS_THEY_ARE,
        sample["rows"],
    )
    for name, sample in frozen("contracts/judged_formats", "samples").items()
}
# What a row of the table leaves out.
DEFAULTS = {
    "preference": {"margin": None, "scores": (None, None), "datasource": "default"},
    "steps": {"datasource": "default"},
}
DETECTED = [name for name, (_, _, reading, _) in SAMPLE_ROWS.items() if reading is AS_THEY_ARE]
MARGINS = {PREFERENCE: "chosen", STEPS: "labels"}


def turns(messages: tuple[Message, ...]) -> tuple[tuple[str, str], ...]:
    def text(message: Message) -> str:
        return "".join(
            part.text if isinstance(part, TextPart) else f"[{Path(describe(part.source)).name}]"
            for part in message.parts
            if isinstance(part, TextPart | ImagePart)
        )

    return tuple((message.role, text(message)) for message in messages)


def seen(row: JudgedRow, *, like: dict) -> dict:
    """The row in the form of what is expected."""
    found = {"turns": turns(row.messages)}
    for name in set(like) - {"turns"}:
        if name == "scores":
            found[name] = (row.chosen_score, row.rejected_score)
        elif name in ("chosen", "rejected", "response"):
            ((role, found[name]),) = turns(getattr(row, name))
            assert role == "assistant"
        else:
            found[name] = getattr(row, name)
    return found


@pytest.mark.parametrize("name", SAMPLE_ROWS)
def test_a_sample_becomes_these_rows(name):
    kind, row_format, reading, expected = SAMPLE_ROWS[name]
    file = read_judged_file(str(SAMPLES / name), kind, reading=reading)
    assert file.row_format.name == row_format
    assert file.summary.startswith(f"{SAMPLES / name}: {len(expected)} rows of the kind {kind.name} in the format")
    wanted = [DEFAULTS[kind.name] | row for row in expected]
    assert [seen(row, like=like) for row, like in zip(file.rows.values(), wanted, strict=True)] == wanted
    for row in file.rows.values():
        assert [load_image(image, location="").size for image in images_of(row.messages)] in ([], [(56, 56)])


def test_every_sample_is_expected_to_be_something():
    assert {file.name for file in SAMPLES.iterdir() if file.is_file()} == set(SAMPLE_ROWS)
    formats = {row_format.name for kind in (PREFERENCE, STEPS) for row_format in kind.formats.formats}
    assert {row_format for _, row_format, _, _ in SAMPLE_ROWS.values()} == formats


@pytest.mark.parametrize("name", DETECTED)
def test_the_columns_of_a_sample_tell_one_format_of_one_kind(name):
    columns = {column for fields, _, _ in read_records(str(SAMPLES / name)) for column in fields}
    fitting = [
        (kind.name, row_format.name)
        for kind in (PREFERENCE, STEPS)
        for row_format in kind.formats.formats
        if row_format.fits(columns)
    ]
    kind, row_format, _, _ = SAMPLE_ROWS[name]
    assert fitting == [(kind.name, row_format)]


def test_the_columns_of_openrlhf_may_be_named_for_steps_as_well():
    found = read_judged_file(str(SAMPLES / "openrlhf_prm.jsonl"), STEPS).rows
    assert read_judged_file(str(SAMPLES / "openrlhf_prm.jsonl"), STEPS, reading=BY_INPUT).rows == found


@pytest.mark.parametrize("name", SAMPLE_ROWS)
def test_a_row_without_one_of_its_columns_is_named_with_its_place_or_read(name, tmp_path):
    """Columns that a row can do without are those that nothing but the record itself would miss."""
    kind, _, reading, _ = SAMPLE_ROWS[name]
    (tmp_path / "images").symlink_to(SAMPLES / "images")
    records = [fields for fields, _, _ in read_records(str(SAMPLES / name))]
    file = tmp_path / "rows.jsonl"
    refused = set()
    for column in records[0]:
        broken = {key: value for key, value in records[0].items() if key != column}
        file.write_text("".join(json.dumps(record) + "\n" for record in (broken, records[0])))
        if broken_is_refused(file, kind, reading):
            refused.add(column)
    named = reading.names
    needed = {
        PREFERENCE.name: {named.chosen or "chosen", named.rejected or "rejected", "completions", "text"},
        STEPS.name: {"completions", "labels", "label", "value", "input"},
    }[kind.name]
    assert needed & set(records[0]) <= refused


def broken_is_refused(file: Path, kind: RowKind, reading: RowReading) -> bool:
    try:
        read_judged_file(str(file), kind, reading=reading)
        return False
    except UserError as error:
        told = str(error)
    assert told.startswith(f"{file} line 1: ")
    return True
