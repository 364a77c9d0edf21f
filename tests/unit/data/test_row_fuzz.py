"""Every format with every kind of value in each of its columns: a row is read whole, or refused with file, line and column.

The formats are those of the registries, so that a new one is tried as well; each has a sample under `datasets/samples/`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmm_r1.data.files import read_records, read_row_file
from lmm_r1.data.formats import PROMPT_ROWS
from lmm_r1.data.formats.chats import written_messages
from lmm_r1.data.formats.row_format import Column, ColumnNames, Columns, RowFormat
from lmm_r1.data.preferences import PREFERENCE_ROWS, read_pairs
from lmm_r1.data.reading import RowReading

SAMPLES = Path(__file__).resolve().parents[3] / "datasets" / "samples"
# What stands in no sample, so that a row that was read shows whether it holds it.
MARK, NUMBER = "zebra", 271828
EMPTY: dict[str, Any] = {
    "null": None,
    "empty string": "",
    "blanks": "  ",
    "empty list": [],
    "empty object": {},
    "NaN": math.nan,
}
FILLED: dict[str, Any] = {
    "text": MARK,
    "list": [MARK],
    "nested list": [[MARK]],
    "list of an object": [{MARK: MARK}],
    "object": {MARK: MARK},
    "number": NUMBER,
    "fraction": NUMBER + 0.5,
    "true": True,
    "JSON object": json.dumps({MARK: MARK}),
    "JSON list": json.dumps([MARK]),
    "JSON messages": json.dumps([{"role": MARK, "content": MARK}]),
    "JSON number": str(NUMBER),
    "deep JSON list": f'{"[" * 20_000}"{MARK}"{"]" * 20_000}',
    "deep JSON object": f'[{"{" * 20_000}"role": "{MARK}',
}


# Of the completions in it, a pair takes two, and of each the response and the ratings; of names, the order that they tell; of
# verl's reward model, the ground truth.
CHOSEN_FROM = ("completions", "image_names", "reward_model")


@dataclass(frozen=True)
class Known:
    """A format, whether it is one of pairs, and a row in it."""

    row_format: RowFormat[Any]
    pairs: bool
    record: dict[str, Any]
    folder: Path

    def read(
        self, records: list[dict[str, Any]], folder: Path, *, named: bool = True
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the rows that records become, and why others do not, by their places."""
        file = folder / "rows.jsonl"
        # The sample is the last line, so that there is a row.
        file.write_text("".join(json.dumps(record) + "\n" for record in [*records, self.record]))
        reading = RowReading(format=self.row_format.name if named else None, image_dir=self.folder)
        if not self.pairs:
            read = read_row_file(str(file), reading=reading, answer_required=False, bad_rows="skip")
        else:
            read = read_pairs(str(file), reading=reading, bad_rows="skip")
        return read.rows, {row.index: row.reason for row in read.skipped}

    @property
    def asked(self) -> set[str]:
        """The columns that the format asks its sample for."""
        record = _Asked(self.record)
        self.row_format.adapt(_Watched(record, location="sample", names=ColumnNames(), format_is_named=True))
        return record.names

    @property
    def columns(self) -> list[str]:
        """Those, and all others that the sample has."""
        return sorted(self.asked | self.record.keys())


class _Asked(dict[str, Any]):
    """A record that notes which columns it is asked for."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name.partition(".")[0])
        return super().get(name, default)


class _Watched(Columns):
    def take(self, *names: str, key: str | None = None) -> Column:
        self.record.names.update(name.partition(".")[0] for name in names)
        return super().take(*names, key=key)


def known() -> Iterator[Known]:
    for row_format in PROMPT_ROWS.formats:
        (file,) = (SAMPLES / row_format.name).glob("rows.*")
        yield Known(row_format, False, next(read_records(str(file)))[0], file.parent)
    judged = sorted((SAMPLES / "judged").glob("*.json*"))
    for row_format in PREFERENCE_ROWS.formats:
        samples = ((file, next(read_records(str(file)))[0]) for file in judged)
        file, record = next((file, record) for file, record in samples if row_format.fits(set(record)))
        yield Known(row_format, True, record, file.parent)


KNOWN = {f"{'preference' if one.pairs else 'prompts'} {one.row_format.name}": one for one in known()}


def said(row: Any) -> str:
    """Return what a row holds, but for its other columns and its place."""
    return repr({name: value for name, value in vars(row).items() if name not in ("columns", "location")})


def is_held(value: Any, row: Any) -> bool:
    """Say whether a row holds a value of FILLED: labels and scores as numbers."""
    marks: list[str] = [MARK] if MARK in json.dumps(value) else ["True", "1.0"] if value is True else [str(value)]
    return any(mark in said(row) for mark in marks)


def check_refusal(reason: str, *, line: int, column: str, one: Known, folder: Path) -> None:
    """A refusal names file, line and column: the one that was changed, or another one that does not go with it."""
    place = f"{folder}/rows.jsonl line {line}: "
    assert reason.startswith(place), reason
    quoted = " ".join(re.findall(r'"([^"]*)"', reason.removeprefix(place)))
    assert set(quoted.replace(".", " ").split()) & {column, *one.columns}, reason


@pytest.mark.parametrize("name", KNOWN)
def test_a_column_that_holds_nothing_is_as_one_that_is_not_there(name, tmp_path):
    one = KNOWN[name]
    for column in one.columns:
        without = {key: value for key, value in one.record.items() if key != column}
        rows, refused = one.read([without, *({**one.record, column: value} for value in EMPTY.values())], tmp_path)
        for place, kind in enumerate(EMPTY, start=1):
            assert (place in rows) == (0 in rows), (column, kind, refused)
            if place in rows:
                assert said(rows[place]) == said(rows[0]), (column, kind)
            else:
                check_refusal(refused[place], line=place + 1, column=column, one=one, folder=tmp_path)


@pytest.mark.parametrize("name", KNOWN)
def test_a_column_that_holds_something_is_read_or_refused(name, tmp_path):
    one = KNOWN[name]
    asked = one.asked
    for column in one.columns:
        rows, refused = one.read([{**one.record, column: value} for value in FILLED.values()], tmp_path)
        for place, (kind, value) in enumerate(FILLED.items()):
            if place in refused:
                check_refusal(refused[place], line=place + 1, column=column, one=one, folder=tmp_path)
            # What a format does not ask for stays among a prompt's other columns.
            elif column in asked and column not in CHOSEN_FROM:
                assert is_held(value, rows[place]), (column, kind)


def places_in(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to everything inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        yield (*before, key)
        yield from places_in(held, (*before, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at the end of a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", KNOWN)
def test_what_lies_inside_a_column_is_read_or_refused(name, tmp_path):
    one = KNOWN[name]
    for column in sorted(one.asked & one.record.keys()):
        # What a table stores as JSON text.
        held = written_messages(one.record[column])
        for path in places_in(held):
            values = {**EMPTY, **FILLED}
            records = [{**one.record, column: changed(held, path, value)} for value in values.values()]
            rows, refused = one.read(records, tmp_path)
            for place, (kind, value) in enumerate(values.items()):
                if place in refused:
                    check_refusal(refused[place], line=place + 1, column=column, one=one, folder=tmp_path)
                elif kind in FILLED and column not in CHOSEN_FROM:
                    assert is_held(value, rows[place]), (column, path, kind)
