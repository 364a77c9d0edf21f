"""Conversations for tests: images and videos that differ everywhere, messages, rows and files of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart

# Their chat template writes a space before an assistant's words, behind the generation prompt.
SPACED = ("idefics3", "janus", "smolvlm")


def picture(width: int, height: int) -> Image.Image:
    """Return an image whose pixels all differ a little, so that no two patches look the same."""
    pixels = bytes(value % 256 for y in range(height) for x in range(width) for value in (7 * x, 11 * y, 5 * (x + y)))
    return Image.frombytes("RGB", (width, height), pixels)


def clip(frames: int, width: int, height: int, **settings: float) -> VideoPart:
    """Return a video of frames that differ from one another everywhere."""
    still = picture(width, height)
    return VideoPart(tuple(ImageChops.offset(still, 9 * index, 5 * index) for index in range(frames)), **settings)


def message(role: str, *parts: str | Image.Image | ImagePart | VideoPart) -> Message:
    """Return a message of texts, images and videos in the order given."""
    wrapped = {str: TextPart, Image.Image: ImagePart, ImagePart: lambda part: part, VideoPart: lambda part: part}
    return Message(role=role, parts=tuple(wrapped[type(part)](part) for part in parts))


def as_written(name: str, text: str) -> str:
    """Return what the model generates where the chat template of a kit writes a text as an assistant's."""
    if name.startswith("qwen3_5"):
        # The prompt opens a thought.
        thought, _, said = text.strip().removeprefix("<think>").rpartition("</think>")
        return thought.strip() + "\n</think>\n\n" + said.lstrip("\n")
    return f" {text}" if name in SPACED else text


def row(*messages: Message, answer: str = "46") -> Row:
    return Row(messages=messages, answer=answer, datasource="test", location="rows.jsonl, line 1")


def load_rows(path: str, **options: Any) -> list[Row]:
    """Return the rows of `read_row_file`."""
    return list(read_row_file(path, **options).rows.values())


def write_rows(path: Path, *records: object) -> str:
    """Write records as JSON lines and return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)
