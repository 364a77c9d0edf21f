"""Files of JSON: one object, or an object per line, and the fields of such objects.

One process appends to a file of lines while others read it, and it may be killed. A line is complete with its newline. A
killed writer leaves at most one incomplete line at the end: the next writer cuts it off, and readers skip it.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, cast

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically

# JSON allows integers of any size. A browser counts without gaps up to this, and differences of numbers stay finite.
LARGEST_COUNT = 2**53
LARGEST_NUMBER = 1e300


@dataclass(frozen=True, kw_only=True)
class JsonLine:
    """One non-blank line of a file."""

    place: str
    """The file and the line number, for an error message."""
    offset: int
    """Where the line starts, in bytes."""
    raw: bytes
    """The line as it is in the file."""
    record: dict[str, object] | None
    """None for an incomplete last line."""


def read_json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a file; raises UserError for a line that is not a JSON object, unless it is incomplete."""
    offset = 0
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                place = f"{path}, line {number}"
                yield JsonLine(place=place, offset=offset, raw=raw, record=_record(raw, place=place))
            offset += len(raw)


def append_json_lines(path: Path, records: Iterable[Mapping[str, object]], *, readable: bool = False) -> None:
    """Append one line per record; if that fails, the file is unchanged, and the OSError names it.

    Args:
        readable: write characters beyond ASCII unescaped, except in records with a lone surrogate, which a model can write
            and which has no encoding.
    """
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as stream:
            stream.writelines(_line(record, readable=readable) for record in records)
    except BaseException as error:
        # If even this fails, readers skip the incomplete line, and the first error is raised.
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        if isinstance(error, OSError):
            # Errors of writing to an open stream do not name the file.
            error.filename = str(path)
        raise


def cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline of a file, so that the next line can be appended."""
    if not path.exists():
        return
    size = path.stat().st_size
    with path.open("rb") as stream:
        whole = _last_newline(stream, size) + 1
    if whole < size:
        os.truncate(path, whole)


def last_line(path: Path) -> bytes:
    """Return the last non-blank line of a file; empty if there is none."""
    end = path.stat().st_size if path.exists() else 0
    if end == 0:
        return b""
    with path.open("rb") as stream:
        while end > 0:
            begin = _last_newline(stream, end - 1) + 1
            stream.seek(begin)
            line = stream.read(end - begin)
            if line.strip():
                return line
            end = begin
    return b""


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


def _line(record: Mapping[str, object], *, readable: bool) -> bytes:
    if readable:
        try:
            return (json.dumps(record, ensure_ascii=False) + "\n").encode()
        except UnicodeEncodeError:
            pass
    return (json.dumps(record) + "\n").encode()


def _last_newline(stream: BinaryIO, end: int, *, block: int = 2**16) -> int:
    while end > 0:
        begin = max(0, end - block)
        stream.seek(begin)
        found = stream.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found
        end = begin
    return -1


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a file; raises UserError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file ({error}); write it again or delete it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}; write it again or delete it")
    return value


def write_json_object(path: Path, record: Mapping[str, object]) -> None:
    """Write an object to a file, completely or not at all; raises UserError if nothing can be written."""
    write_atomically(path, text=json.dumps(record, indent=2) + "\n")


def _finite(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return float(value) if -LARGEST_NUMBER <= value <= LARGEST_NUMBER else None


Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT)]
Number = Annotated[float | None, BeforeValidator(_finite)]
"""None also for a number that is not finite or too large to calculate with."""
T = TypeVar("T")


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def checked(kind: type[T], record: object, *, place: str) -> T:
    """Return a value of JSON as `kind`, a dataclass without unknown keys; raises UserError with the wrong field."""
    try:
        adapter: TypeAdapter[T] = _adapter(cast(Any, kind))
        checked_record = adapter.validate_python(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ": ".join([place, *([".".join(map(str, first["loc"]))] if first["loc"] else [])])
        raise UserError(f"{field}: {first['msg']}, found {first['input']!r:.80}; write it again") from error
    return checked_record


def text_field(record: Mapping[str, object], key: str, *, place: str) -> str:
    """Return a required string."""
    return checked(str, record.get(key), place=f"{place}: {key}")


def count_field(record: Mapping[str, object], key: str, *, place: str) -> int:
    """Return a required integer, at least 0."""
    return checked(cast(type[int], Count), record.get(key), place=f"{place}: {key}")


def number_field(record: Mapping[str, object], key: str, *, place: str) -> float | None:
    """Return a number; None if the key is absent, or the value is null, not finite or too large to calculate with."""
    return checked(cast(type[float | None], Number), record.get(key), place=f"{place}: {key}")
