"""A file that holds one JSON object, and the fields of objects in this and other files."""

import json
from collections.abc import Mapping
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically

# JSON knows integers of any length. A browser counts without gaps up to here, and differences of numbers stay finite.
LARGEST_COUNT = 2**53
LARGEST_NUMBER = 1e300


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a file; anything else in it is a UserError."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file ({error}); write it again or delete it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}; write it again or delete it")
    return value


def write_json_object(path: Path, record: Mapping[str, object]) -> None:
    """Write an object to a file, all of it or nothing; raises UserError where nothing can be written."""
    write_atomically(path, text=json.dumps(record, indent=2) + "\n")


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
