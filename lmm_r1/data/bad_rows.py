"""Records that no row can be made of: all of them are told, and a command stops at them or goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lmm_r1.data.formats.row_format import Record
from lmm_r1.errors import ListedError, UserError

BadRows = Literal["stop", "skip"]
"""What becomes of a file with bad rows: it is refused, or read without them."""
RowT = TypeVar("RowT")
MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A row that was left out."""

    index: int
    """Its place among the records of its file, from 0."""
    reason: str
    """One sentence with the file and the line."""


class Unreadable(dict[str, Any]):
    """Stands for the fields of a record that its file does not have in a readable form."""

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self.error = error


def good_rows(
    path: str, records: Iterable[Record], make: Callable[[Record], RowT], *, bad_rows: BadRows, skip_by: str | None
) -> tuple[dict[int, RowT], list[SkippedRow]]:
    """Return the rows that `make` makes of the records of a file, by their places, and what was left out.

    Args:
        make: raises UserError for a record that no row can be made of.
        skip_by: how the command is told to go on without bad rows, for messages; None where it cannot be.

    Raises:
        UserError: there is no record, none can be used, or with `stop` any cannot; all of those are told.
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
        raise no_rows(path)
    if skipped and bad_rows == "stop":
        raise _refusal(path, skipped, count=len(rows) + len(skipped), skip_by=skip_by if rows else None)
    if not rows:
        raise UserError(f"{path}: none of its {len(skipped)} rows can be used; the first: {skipped[0].reason}")
    return rows, skipped


def no_rows(path: str) -> UserError:
    """Return the error of a file without rows."""
    return UserError(f"{path} holds no rows; check the path")


def reasons(skipped: Sequence[SkippedRow], *, listed_in: str | None = None) -> list[str]:
    """Return a line for each of the first rows that were left out, and one for how many more there are.

    Args:
        listed_in: where all of them are listed.
    """
    lines = [" ".join(row.reason.split()) for row in skipped[:MAX_LISTED]]
    if len(skipped) > MAX_LISTED:
        where = f"; {listed_in} lists them all" if listed_in else ""
        lines.append(f"and {len(skipped) - MAX_LISTED:,} more{where}")
    return lines


def _refusal(path: str, skipped: Sequence[SkippedRow], *, count: int, skip_by: str | None) -> UserError:
    way = "" if skip_by is None else f", or go on without {'it' if len(skipped) == 1 else 'them'} by {skip_by}"
    if len(skipped) == 1:
        return UserError(f"{skipped[0].reason}{way}")
    sentence = f"{path}: {len(skipped):,} of its {count:,} rows cannot be used; correct or remove them{way}:"
    return ListedError(sentence, reasons(skipped))
