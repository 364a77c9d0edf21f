"""Prompts received over the network: JSON messages become rows, with images only from where the operator allows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmm_r1.data.images import fetched
from lmm_r1.data.media_access import is_below
from lmm_r1.data.messages import ImagePart, Part, Row, VideoPart, describe, kind_of
from lmm_r1.data.row_parser import ASKED_NAMES, parse_row
from lmm_r1.errors import UserError
from remote_rm.protocol import without_lone_surrogates

MOST_PIXELS = 2**24
"""The most pixels that a prompt may ask to scale an image up to: 4096 x 4096."""

# How `data.messages.describe` names an image that has neither a path nor a URL.
_DESCRIPTION = re.compile(r"<image\b[^/]*>")
_OPENING = re.compile(r"\s*\[\s*\{")


@dataclass(frozen=True, kw_only=True)
class MediaAccess:
    """Where images and videos of prompts may come from; data URIs and base64 text are always allowed."""

    roots: tuple[Path, ...]
    """Folders on this machine below which files may be read."""
    allow_urls: bool
    """Whether http and https URLs are fetched."""

    def row_of(self, prompt: str, *, location: str) -> Row | None:
        """Return the row of a prompt that is JSON messages, with its URLs fetched; None for any other text.

        Raises UserError for messages that break the row schema, and for media that must not be read.
        """
        messages = _messages(prompt)
        if messages is None:
            return None
        record = {"messages": messages}
        row = parse_row(record, location=location, base_dir=Path("/"), answer_required=False, names=ASKED_NAMES)
        return replace(
            row,
            messages=tuple(
                replace(message, parts=tuple(self._read(part, location=location) for part in message.parts))
                for message in row.messages
            ),
        )

    def _read(self, part: Part, *, location: str) -> Part:
        if isinstance(part, ImagePart | VideoPart) and (part.min_pixels or 0) > MOST_PIXELS:
            raise UserError(f"{location}: min_pixels {part.min_pixels} is too large; ask for at most {MOST_PIXELS}")
        if isinstance(part, ImagePart):
            return self._read_image(part, location=location)
        if not isinstance(part, VideoPart):
            return part
        if isinstance(part.source, str):
            self._check_path(part.source, location=location, kind="video")
            return part
        frames = tuple(self._read_image(ImagePart(frame), location=location).source for frame in part.source)
        return replace(part, source=frames)

    def _read_image(self, part: ImagePart, *, location: str) -> ImagePart:
        kind = kind_of(part.source)
        if kind == "path":
            self._check_path(str(part.source), location=location, kind="image")
        if kind == "url" and not self.allow_urls:
            raise UserError(
                f"{location}: this server fetches no image from a URL ({describe(part.source)}); start it with "
                "--allow_urls, or send the image as a data URI"
            )
        return fetched(part, location=location)

    def _check_path(self, source: str, *, location: str, kind: str) -> None:
        """Refuse a file outside the allowed folders; the message is the same whether or not the file exists."""
        name = Path(source).name
        if _DESCRIPTION.fullmatch(name):
            raise UserError(
                f"{location}: the prompt names its image only as {name}, because the sender held it in memory; "
                "keep images of rows as files or URLs, or send them as data URIs"
            )
        if not self.roots:
            raise UserError(
                f"{location}: this server reads no {kind} files ({source}); start it with --image_root FOLDER, or send "
                "images as data URIs"
            )
        if not is_below(source, self.roots):
            folders = ", ".join(map(str, self.roots))
            raise UserError(
                f"{location}: the {kind} {source} is not below a folder given with --image_root ({folders}); add its "
                "folder, or send images as data URIs"
            )


def ending_of(query: str, *, response: str) -> str | None:
    """Return what follows the response in the query: an end token, or "" if it was cut off; None if it is not found."""
    start = query.rfind(response) if response else -1
    return None if start < 0 else query[start + len(response) :]


def _messages(prompt: str) -> list[Any] | None:
    """Return the messages of a JSON text; None for any other text, such as a rendered prompt."""
    if not _OPENING.match(prompt):
        return None
    try:
        value = json.loads(prompt)
        if "\\ud" in prompt.lower():
            value = json.loads(without_lone_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
    return value if is_chat else None
