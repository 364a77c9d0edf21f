"""Messages as they stand in a row file: images by path, URL or data URI, so that the row can be read again."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from lmm_r1.data.image_sources import ImageSource
from lmm_r1.data.messages import ImagePart, Message, TextPart, VideoPart
from lmm_r1.data.row_parser import IMAGE_TAG, VIDEO_TAG

# Read as places of images in a message that is one text; as plain words in a part of its own.
MEDIA_TAGS = (IMAGE_TAG, VIDEO_TAG)


def stored_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that `parse_row` reads; images that are not text already become data URIs."""
    return [{"role": message.role, "content": _content(message)} for message in messages]


def _content(message: Message) -> str | list[dict[str, Any]]:
    parts = message.parts
    if len(parts) == 1 and isinstance(parts[0], TextPart) and not any(tag in parts[0].text for tag in MEDIA_TAGS):
        return parts[0].text
    return [_part(part) for part in parts]


def _part(part: TextPart | ImagePart | VideoPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    bounds = {name: getattr(part, name) for name in ("min_pixels", "max_pixels") if getattr(part, name) is not None}
    if isinstance(part, ImagePart):
        return {"type": "image", "image": _source(part.source), **bounds}
    frames = {name: getattr(part, name) for name in ("fps", "max_frames") if getattr(part, name) is not None}
    video = part.source if isinstance(part.source, str) else [_source(frame) for frame in part.source]
    return {"type": "video", "video": video, **frames, **bounds}


def _source(source: ImageSource) -> str:
    if isinstance(source, str):
        return source
    if isinstance(source, Image.Image):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        source = buffer.getvalue()
    with Image.open(io.BytesIO(source)) as image:
        mime_type = Image.MIME[image.format]
    return f"data:{mime_type};base64,{base64.b64encode(source).decode('ascii')}"
