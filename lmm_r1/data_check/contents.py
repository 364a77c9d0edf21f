"""What rows hold, told apart by content: text without its spaces, images by their pixels."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.videos import load_video
from lmm_r1.data_check.judged import JudgedView, Side, sides_of
from lmm_r1.errors import UserError

# Rows whose images are in memory at a time, in all threads together.
_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True)
class RowContent:
    """What one row holds."""

    question: bytes
    """The same for rows with the same prompt: its text, less spaces and capitals, its images and its videos."""
    opening: bytes | None
    """The same for rows that begin by asking the same of the same images, whatever is said later and whatever the system turn
    says: a trajectory and the question that it answers. None where there is no image before the model's first turn."""
    repeated: bytes
    """The same for rows that are one row twice, or that contradict one another: with judged responses, the same ones beside the
    same question, in whatever order."""
    answer: str
    sizes: tuple[tuple[int, int], ...]
    """Width and height of each image."""
    error: str | None
    """Why an image or a video cannot be read; what the row asks is not known then."""


def contents(rows: Mapping[int, Row]) -> Iterator[tuple[int, RowContent]]:
    """Yield what each row holds, in order; images are decoded by several threads and not kept."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        for chunk in _chunks(rows.items(), size=_AT_A_TIME):
            found = threads.map(content_of, [row for _, row in chunk])
            yield from zip((index for index, _ in chunk), found, strict=True)


def content_of(row: Row) -> RowContent:
    """Return what a row holds; what it asks is all but a last turn of the assistant."""
    prompt = row.messages[:-1] if is_conversation(row) else row.messages
    sides = sides_of(row)
    answer = (
        row.verdict if isinstance(row, JudgedView) else row.answer or _text((row.response or row.messages[-1]).parts)
    )
    opening = list(itertools.takewhile(lambda message: message.role != "assistant", row.messages))
    first = len(images_of(opening))
    digest, asked = hashlib.sha256(), hashlib.sha256()
    sizes: list[tuple[int, int]] = []
    for message in prompt:
        digest.update(_told(message))
    for message in opening:
        if message.role != "system":
            asked.update(_told(message))
    try:
        for part in images_of(row.messages):
            pixels = _pixels(part, row, sizes)
            digest.update(pixels)
            if len(sizes) <= first:
                asked.update(pixels)
        for video in videos_of(row.messages):
            digest.update(_frames(video, row))
        beside = sorted(_side(side, row, sizes) for side in sides)
    except UserError as error:
        return RowContent(
            question=b"", opening=None, repeated=b"", answer=answer, sizes=tuple(sizes), error=str(error)
        )
    return RowContent(
        question=digest.digest(),
        opening=asked.digest() if first else None,
        repeated=digest.digest() + b"".join(beside),
        answer=answer,
        sizes=tuple(sizes),
        error=None,
    )


def _pixels(part: ImagePart, row: Row, sizes: list[tuple[int, int]]) -> bytes:
    """Return what tells an image from others, and note its size."""
    image = load_image(part, location=row.location)
    sizes.append(image.size)
    return repr(image.size).encode() + hashlib.sha256(image.tobytes()).digest()


def _frames(part: VideoPart, row: Row) -> bytes:
    frames = load_video(part, location=row.location).frames
    return repr(frames.shape).encode() + hashlib.sha256(frames.tobytes()).digest()


def _side(side: Side, row: Row, sizes: list[tuple[int, int]]) -> bytes:
    """Return what tells a response from others."""
    digest = hashlib.sha256()
    for message in side.turns:
        digest.update(_told(message))
    for image in images_of(side.turns):
        digest.update(_pixels(image, row, sizes))
    for video in videos_of(side.turns):
        digest.update(_frames(video, row))
    return digest.digest()


def is_conversation(row: Row) -> bool:
    """Say whether a row ends with a turn to learn from, and is no prompt."""
    return row.messages[-1].role == "assistant"


def _told(message: Message) -> bytes:
    return f"{message.role}\0{''.join(_text(message.parts).split()).casefold()}\0".encode()


def _text(parts: Iterable[object]) -> str:
    return " ".join(part.text for part in parts if isinstance(part, TextPart))


def _chunks(items: Iterable[tuple[int, Row]], *, size: int) -> Iterator[list[tuple[int, Row]]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
