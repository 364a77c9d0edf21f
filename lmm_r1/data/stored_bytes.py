"""Encoded images that stay in the file that holds them until they are needed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmm_r1.errors import UserError


class ChangedFile(UserError):
    """A row file is not what it was when its rows were read: no fault of one row, and none can be read any more."""


FEWEST_BYTES = 1024
"""Shorter values are kept as bytes: their place would take as much memory."""


class Place(Protocol):
    """Where values lie; hashable, and equal where the place is the same."""

    @property
    def name(self) -> str:
        """What the user calls the rows, for messages."""

    def read(self, position: int, length: int) -> bytes:
        """Return the value; raises OSError where the file is not what it was when the rows were read."""


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A value of a row file by its place; equal where the place is the same.

    Copies share the place. Another process gets the bytes: it may be on a machine that does not have the file.
    """

    place: Place
    position: int
    """Within the place, in its own units."""
    length: int
    """In bytes."""
    row: int = field(compare=False)
    """Its row in the file, from 1, for messages."""

    def read(self) -> bytes:
        """Return the bytes; raises ChangedFile, with file and row, where the file has changed or gone since it was read."""
        try:
            return self.place.read(self.position, self.length)
        except OSError as error:
            raise ChangedFile(
                f"{self.place.name} row {self.row}: its image cannot be read any more: {error}; rows leave their images "
                "in the file, so start again, and leave the file as it is while it is in use"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.read(),)

    def __copy__(self) -> StoredBytes:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredBytes:
        return self


@dataclass(frozen=True)
class FileState:
    """A file as it was when its rows were read."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> FileState:
        found = os.stat(path)
        return cls(path, found.st_size, found.st_mtime_ns)

    def check(self, found: os.stat_result) -> None:
        """Raise OSError where the file is another one now, or was written to."""
        if (found.st_size, found.st_mtime_ns) != (self.size, self.mtime_ns):
            raise OSError(f"{self.path} was changed")


@dataclass(frozen=True)
class FilePlace:
    """A file that holds values as they are; a position is a value's offset in bytes."""

    state: FileState
    name: str = field(compare=False)

    def read(self, position: int, length: int) -> bytes:
        """Return the value; a file is opened for each, so that thousands of them take no descriptors."""
        with open(self.state.path, "rb", buffering=0) as file:
            self.state.check(os.fstat(file.fileno()))
            pieces = []
            # One call gives 2 GiB at most.
            while length > 0:
                piece = os.pread(file.fileno(), length, position)
                if not piece:
                    raise OSError(f"{self.state.path} was cut short")
                pieces.append(piece)
                position, length = position + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
