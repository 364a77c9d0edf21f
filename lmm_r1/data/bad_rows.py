"""Records that are not valid rows: a command reports all of them, and stops or leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lmm_r1.data.formats.row_format import Record
from lmm_r1.errors import ListedError, UserError
from lmm_r1.files.json_files import count_field, read_json_lines, text_field

BadRows = Literal["stop", "skip"]
"""Whether a file with bad rows is refused or read without them."""
RowT = TypeVar("RowT")
MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A row that was left out."""

    index: int
    """Its index among the records of its file, from 0."""
    reason: str
    """One sentence with the file and the line."""


class Unreadable(dict[str, Any]):
    """Takes the place of a record that its file does not hold in a readable form."""

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self.error = error


def good_rows(
    path: str, records: Iterable[Record], make: Callable[[Record], RowT], *, bad_rows: BadRows, skip_by: str | None
) -> tuple[dict[int, RowT], list[SkippedRow]]:
    """Return the rows of a file by their index, and the records that were left out.

    Args:
        make: makes a row of a record; raises UserError for an invalid one.
        skip_by: the flag that leaves out bad rows, for messages; None if the command has none.

    Raises:
        UserError: there is no record, or no valid one, or `bad_rows` is `stop` and some are invalid; lists all of them.
    """
    rows: dict[int, RowT] = {}
    skipped: list[SkippedRow] = []
    for index, record in enumerate(records):
        try:
            if isinstance(record[0], Unreadable):
                raise record[0].error
            rows[index] = make(record)
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not rows and not skipped:
        raise UserError(f"{path} holds no rows; check the path")
    if skipped and bad_rows == "stop":
        raise _refusal(path, skipped, count=len(rows) + len(skipped), skip_by=skip_by if rows else None)
    if not rows:
        raise UserError(f"{path}: none of its {len(skipped)} rows can be used; the first: {skipped[0].reason}")
    return rows, skipped


def reasons(skipped: Sequence[SkippedRow], *, listed_in: str | None = None) -> list[str]:
    """Return a line for each of the first rows that were left out, and a line with the number of the others.

    Args:
        listed_in: the file that lists all of them.
    """
    lines = [" ".join(row.reason.split()) for row in skipped[:MAX_LISTED]]
    if len(skipped) > MAX_LISTED:
        where = f"; {listed_in} lists them all" if listed_in else ""
        lines.append(f"and {len(skipped) - MAX_LISTED:,} more{where}")
    return lines


def read_skipped(path: Path) -> list[SkippedRow]:
    """Return the rows that a file of JSON lines lists as left out, none if there is no such file."""
    if not path.exists():
        return []
    return [
        SkippedRow(
            index=count_field(line.record, "index", place=line.place),
            reason=text_field(line.record, "reason", place=line.place),
        )
        for line in read_json_lines(path)
        if line.record is not None
    ]


def _refusal(path: str, skipped: Sequence[SkippedRow], *, count: int, skip_by: str | None) -> UserError:
    way = "" if skip_by is None else f", or leave {'it' if len(skipped) == 1 else 'them'} out with {skip_by}"
    if len(skipped) == 1:
        return UserError(f"{skipped[0].reason}{way}")
    sentence = f"{path}: {len(skipped):,} of its {count:,} rows cannot be used; correct or remove them{way}:"
    return ListedError(sentence, reasons(skipped))
