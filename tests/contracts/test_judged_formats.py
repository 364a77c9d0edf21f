"""What every format of judged responses must keep to: its sample is told by its columns, and becomes the rows that stand here."""

from pathlib import Path

import pytest
from helpers.tables import frozen

from lmm_r1.data.files import read_records
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, PreferenceRow, TextPart, describe, images_of
from lmm_r1.data.preferences import PREFERENCE_ROWS, read_pairs
from lmm_r1.data.reading import AS_THEY_ARE, RowReading

SAMPLES = Path(__file__).resolve().parents[2] / "datasets" / "samples" / "judged"
SAMPLE_ROWS = {
    name: (
        sample["format"],
        RowReading(names=ColumnNames(**sample["columns"])) if "columns" in sample else AS_THEY_ARE,
        sample["rows"],
    )
    for name, sample in frozen("contracts/judged_formats", "samples").items()
}
# What a row of the table leaves out.
DEFAULTS = {"margin": None, "scores": (None, None), "datasource": "default"}
DETECTED = [name for name, (_, reading, _) in SAMPLE_ROWS.items() if reading is AS_THEY_ARE]


def turns(messages: tuple[Message, ...]) -> tuple[tuple[str, str], ...]:
    def text(message: Message) -> str:
        return "".join(
            part.text if isinstance(part, TextPart) else f"[{Path(describe(part.source)).name}]"
            for part in message.parts
            if isinstance(part, TextPart | ImagePart)
        )

    return tuple((message.role, text(message)) for message in messages)


def seen(row: PreferenceRow, *, like: dict) -> dict:
    """The row in the form of what is expected."""
    found = {"turns": turns(row.messages)}
    for name in set(like) - {"turns"}:
        if name == "scores":
            found[name] = (row.chosen_score, row.rejected_score)
        elif name in ("chosen", "rejected"):
            ((role, found[name]),) = turns(getattr(row, name))
            assert role == "assistant"
        else:
            found[name] = getattr(row, name)
    return found


@pytest.mark.parametrize("name", SAMPLE_ROWS)
def test_a_sample_becomes_these_rows(name):
    row_format, reading, expected = SAMPLE_ROWS[name]
    file = read_pairs(str(SAMPLES / name), reading=reading)
    assert file.row_format.name == row_format
    assert file.summary.startswith(f"{SAMPLES / name}: {len(expected)} rows of the kind preference in the format")
    wanted = [DEFAULTS | row for row in expected]
    assert [seen(row, like=like) for row, like in zip(file.rows.values(), wanted, strict=True)] == wanted
    for row in file.rows.values():
        assert [load_image(image, location="").size for image in images_of(row.messages)] in ([], [(56, 56)])


@pytest.mark.parametrize("name", DETECTED)
def test_the_columns_of_a_sample_tell_one_format_of_one_kind(name):
    columns = {column for fields, _, _ in read_records(str(SAMPLES / name)) for column in fields}
    fitting = [row_format.name for row_format in PREFERENCE_ROWS.formats if row_format.fits(columns)]
    assert fitting == [SAMPLE_ROWS[name][0]]
