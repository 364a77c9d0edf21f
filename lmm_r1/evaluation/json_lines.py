"""JSON-lines files that another process writes, perhaps right now, perhaps until it was killed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.errors import UserError

# JSON knows integers of any length. A browser counts without gaps up to here, and differences of numbers stay finite.
LARGEST_COUNT = 2**53
LARGEST_NUMBER = 1e300


@dataclass(frozen=True, kw_only=True)
class JsonLine:
    """One non-blank line of a file."""

    place: str
    """The file and the line number, for an error message."""
    offset: int
    """Where the line starts, in bytes."""
    record: dict[str, object] | None
    """None for a torn last line: cut off by the end of the file, before its newline."""


def read_json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a file; a line that is no JSON object is a UserError, unless it is a torn last line."""
    offset = 0
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                place = f"{path}, line {number}"
                yield JsonLine(place=place, offset=offset, record=_record(raw, place=place))
            offset += len(raw)


def _record(raw: bytes, *, place: str) -> dict[str, object] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        if not raw.endswith(b"\n"):
            return None
        raise UserError(f"{place}: not a JSON object ({error}); repair or delete this line") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object, found {type(record).__name__}; repair or delete this line")
    return record


def text_field(record: dict[str, object], key: str, *, place: str) -> str:
    """Return a string that must be there."""
    value = record.get(key)
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} must be a string, found {_shown(record, key)}")
    return value


def count_field(record: dict[str, object], key: str, *, place: str) -> int:
    """Return an integer from 0 up that must be there."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise UserError(f"{place}: {key} must be an integer from 0 up, found {_shown(record, key)}")
    return value


def number_field(record: dict[str, object], key: str, *, place: str) -> float | None:
    """Return a number, or None where the key is absent, null, not finite or too large to reckon with."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{place}: {key} must be a number, found {_shown(record, key)}")
    return float(value) if -LARGEST_NUMBER <= value <= LARGEST_NUMBER else None


def _shown(record: dict[str, object], key: str) -> str:
    return repr(record[key])[:80] if key in record else "nothing"
