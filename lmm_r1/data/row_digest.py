"""What tells the rows of one run from those of another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from lmm_r1.data.image_sources import ImageSource, describe, kind_of
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.data.preferences import PreferenceRow, StepRow, UnpairedRow
from lmm_r1.data.stored_bytes import StoredBytes

AnyRow: TypeAlias = Row | PreferenceRow | StepRow | UnpairedRow


def rows_digest(rows: Sequence[AnyRow]) -> str:
    """Return the number of rows and a digest of what they ask and answer; of an image in a file its name counts,
    and of one in a row file that file's name, its row and its length: all images of a row file can be terabytes.
    """
    digest = hashlib.sha256()
    for row in rows:
        if not isinstance(row, Row):
            _add_judged(digest, row)
            continue
        _add_messages(digest, row.messages)
        begun = f"\0{row.prefill}" if row.prefill else ""
        digest.update(f"\0{row.answer}\0{row.datasource}{begun}\n".encode(errors="replace"))
        if row.plain:
            digest.update(b"\0plain")
    return f"{len(rows)} rows {digest.hexdigest()[:12]}"


def files_of_rows(rows: Iterable[Row]) -> list[tuple[str, int, int]]:
    """Return the local files that hold the images and videos of rows: their names, sizes and times of change.

    A folder that was moved holds the same ones. A file that is not there has a size and a time of 0.
    """
    parts = (part for row in rows for message in row.messages for part in message.parts)
    paths = {path for part in parts for path in map(_path_of, _sources_of(part)) if path}
    return sorted((os.path.basename(path), *_state(path)) for path in paths)


def _sources_of(part: TextPart | ImagePart | VideoPart) -> Sequence[ImageSource]:
    if isinstance(part, TextPart):
        return ()
    return part.source if isinstance(part.source, list | tuple) else (part.source,)


def _path_of(source: ImageSource) -> str:
    if isinstance(source, StoredBytes):
        return source.place.name
    return source if isinstance(source, str) and kind_of(source) == "path" else ""


def _state(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _add_judged(digest: hashlib._Hash, row: PreferenceRow | StepRow | UnpairedRow) -> None:
    match row:
        case PreferenceRow():
            turns = {"chosen": row.chosen, "rejected": row.rejected}
            judged = f"{row.margin}\0{row.chosen_score}\0{row.rejected_score}"
        case UnpairedRow():
            turns, judged = {"response": row.response}, str(row.desirable)
        case StepRow():
            turns, judged = {}, "\0".join([*row.steps, *map(str, row.labels)])
    for name, messages in {"prompt": row.messages, **turns}.items():
        digest.update(f"\0{name}".encode())
        _add_messages(digest, messages)
    digest.update(f"\0{judged}\0{row.datasource}\0{row.plain}\n".encode(errors="replace"))


def _add_messages(digest: hashlib._Hash, messages: Sequence[Message]) -> None:
    for message in messages:
        for part in message.parts:
            digest.update(_described(part))
        digest.update(message.role.encode())


def _described(part: TextPart | ImagePart | VideoPart) -> bytes:
    if isinstance(part, TextPart):
        return part.text.encode(errors="replace")
    pixels = f" {part.min_pixels} {part.max_pixels}".encode()
    if isinstance(part, VideoPart):
        video = part.source if isinstance(part.source, str) else [_frame_told(frame) for frame in part.source]
        return f"{video} {part.fps} {part.max_frames}".encode(errors="replace") + pixels
    if isinstance(part.source, bytes):
        return part.source + pixels
    if isinstance(part.source, str):
        return part.source.rpartition("/")[2].encode(errors="replace") + pixels
    if isinstance(part.source, StoredBytes):
        return _stored_told(part.source).encode(errors="replace") + pixels
    return part.source.tobytes() + pixels


def _frame_told(frame: ImageSource) -> str:
    return _stored_told(frame) if isinstance(frame, StoredBytes) else describe(frame)


def _stored_told(stored: StoredBytes) -> str:
    return f"{os.path.basename(stored.place.name)} {stored.row} {stored.length}"
