"""The one row schema: chat messages of text and image parts with an answer, validated once when a record is read."""

import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image

from lmm_r1.data.image_sources import ImageSource, describe, resolve
from lmm_r1.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
IMAGE_TAG = "<image>"
_DEFAULT_MESSAGE_KEYS = ("message", "messages")
# A string is read as JSON messages only when it opens like them; "[1, 2] sort these" stays a plain prompt.
_JSON_MESSAGES = re.compile(r'\s*\[?\s*\{.*"role"', re.DOTALL)
# Names under which writers of chat messages put the source of an image part.
_SOURCE_KEYS = ("image", "image_url", "url", "path", "base64")


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    source: ImageSource
    """Absolute path, http(s) URL, data URI, base64 text, encoded bytes or a PIL image."""
    _: KW_ONLY
    min_pixels: int | None = None
    """The image processor scales the image up to at least this many pixels; None leaves it to the model's default."""
    max_pixels: int | None = None
    """The image processor scales the image down to at most this many pixels; None leaves it to the model's default."""


@dataclass(frozen=True, kw_only=True)
class Message:
    role: str
    """One of `ROLES`."""
    parts: tuple[TextPart | ImagePart, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    messages: tuple[Message, ...]
    answer: str
    """The label for the reward; empty only where the caller did not require one."""
    datasource: str
    location: str
    """File and line, for error messages."""


def parse_row(
    record: Mapping[str, Any],
    *,
    location: str,
    base_dir: Path,
    message_key: str | None = None,
    answer_key: str = "answer",
    image_key: str = "images",
    answer_required: bool = True,
) -> Row:
    """The validated row of one record; relative image paths become absolute against `base_dir`.

    Args:
        message_key: the field with the messages (a list, or JSON text of one) or with a plain prompt, which becomes
            one user turn; None looks for `message` and `messages`.
        image_key: the field with the images that fill `<image>` tags and image parts without a source, in order.

    Raises:
        UserError: the record breaks the schema; the message begins with `location`.
    """
    images = record.get(image_key)
    if images is not None and (isinstance(images, (str, bytes)) or not isinstance(images, Sequence)):
        images = [images]
    parser = _Parser(location=location, base_dir=base_dir, images=list(images or []), image_key=image_key)
    messages = parser.messages(_message_field(record, message_key=message_key, parser=parser))
    parser.finish()
    return Row(
        messages=messages,
        answer=parser.answer(record, key=answer_key, required=answer_required),
        datasource=str(record.get("datasource") or "default"),
        location=location,
    )


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    """Every image part, in the order in which the model reads them."""
    return [part for message in messages for part in message.parts if isinstance(part, ImagePart)]


def to_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The form chat templates take: `[text]` → `"text"`; `[image, text]` → `[{"type": "image"}, {"type": "text", ...}]`."""
    return [{"role": message.role, "content": _content(message, with_sources=False)} for message in messages]


def to_json(messages: Sequence[Message]) -> str:
    """Compact JSON of the messages with image paths and URLs kept and other images as `<image WxH>`."""
    chat = [{"role": message.role, "content": _content(message, with_sources=True)} for message in messages]
    return json.dumps(chat, ensure_ascii=False, separators=(",", ":"))


def _content(message: Message, *, with_sources: bool) -> str | list[dict[str, str]]:
    if len(message.parts) == 1 and isinstance(message.parts[0], TextPart):
        return message.parts[0].text
    content = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        elif with_sources:
            content.append({"type": "image", "image": describe(part.source)})
        else:
            content.append({"type": "image"})
    return content


def _message_field(record: Mapping[str, Any], *, message_key: str | None, parser: "_Parser") -> Any:
    keys = _DEFAULT_MESSAGE_KEYS if message_key is None else (message_key,)
    found = [key for key in keys if record.get(key) is not None]
    if not found:
        wanted = " or ".join(f'"{key}"' for key in keys)
        parser.fail(f"no field {wanted} (found: {', '.join(record) or 'nothing'}); name it with --data.input_key")
    if len(found) > 1:
        parser.fail('both "message" and "messages" are given; choose one with --data.input_key')
    return record[found[0]]


class _Parser:
    """Reads one record: `images` fill the places for images in order; every error starts with the location."""

    def __init__(self, *, location: str, base_dir: Path, images: list[Any], image_key: str) -> None:
        self.location = location
        self.base_dir = base_dir
        self.image_key = image_key
        self.images = images
        self.used = 0

    def fail(self, sentence: str) -> NoReturn:
        raise UserError(f"{self.location}: {sentence}")

    def messages(self, value: Any) -> tuple[Message, ...]:
        if isinstance(value, str):
            if not _JSON_MESSAGES.match(value):
                return (self.message({"role": "user", "content": value}, where="the prompt"),)
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                self.fail(f"the messages are not valid JSON: {error}")
        if not isinstance(value, Sequence) or not value:
            self.fail("the messages must be a list with at least one message, or JSON text of one")
        return tuple(self.message(item, where=f"message {number}") for number, item in enumerate(value, start=1))

    def message(self, item: Any, *, where: str) -> Message:
        if not isinstance(item, Mapping):
            self.fail(f'{where} must be an object with "role" and "content", not {type(item).__name__}')
        role = item.get("role")
        if role not in ROLES:
            self.fail(f"{where} has the role {role!r}; known roles are {', '.join(ROLES)}")
        content = item.get("content")
        if isinstance(content, str):
            parts = [TextPart(content)] if role == "assistant" else self.tagged(content)
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            parts = [self.part(part, where=f"{where}, part {number}") for number, part in enumerate(content, start=1)]
        else:
            self.fail(f'{where} ({role}) needs a "content" that is text or a list of parts')
        if not any(isinstance(part, ImagePart) or part.text.strip() for part in parts):
            self.fail(f"{where} ({role}) is empty")
        return Message(role=role, parts=tuple(parts))

    def tagged(self, text: str) -> list[TextPart | ImagePart]:
        """`"<image>\\nFind x."` → an image part from the image field, then the text `"Find x."`."""
        if IMAGE_TAG not in text:
            return [TextPart(text)]
        parts: list[TextPart | ImagePart] = []
        for position, piece in enumerate(text.split(IMAGE_TAG)):
            if position > 0:
                parts.append(ImagePart(self.next_source()))
            if piece.strip():
                parts.append(TextPart(piece.strip()))
        return parts

    def part(self, part: Any, *, where: str) -> TextPart | ImagePart:
        if not isinstance(part, Mapping):
            self.fail(f'{where} must be an object with a "type", not {type(part).__name__}')
        kind = part.get("type")
        if kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                self.fail(f'{where} has the type "text" but no "text" string')
            return TextPart(text)
        if kind not in ("image", "image_url"):
            self.fail(f"{where} has the type {kind!r}; known types are text, image, image_url")
        value = next((part[key] for key in _SOURCE_KEYS if part.get(key) is not None), None)
        min_pixels = self.pixels(part, "min_pixels", where=where)
        max_pixels = self.pixels(part, "max_pixels", where=where)
        if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
            self.fail(f"{where} has min_pixels {min_pixels} above max_pixels {max_pixels}")
        source = self.next_source() if value is None else self.source(value, where=where)
        return ImagePart(source, min_pixels=min_pixels, max_pixels=max_pixels)

    def next_source(self) -> ImageSource:
        """The image field's next entry, for an `<image>` tag or an image part without a source."""
        if self.used == len(self.images):
            self.fail(
                f'more "{IMAGE_TAG}" places in the messages than the {len(self.images)} images in the field '
                f'"{self.image_key}"; add the missing images, or name another field with --data.image_key'
            )
        self.used += 1
        return self.source(self.images[self.used - 1], where=f"{self.image_key} entry {self.used}")

    def finish(self) -> None:
        if self.used < len(self.images):
            self.fail(
                f'{len(self.images)} images in the field "{self.image_key}" but {self.used} "{IMAGE_TAG}" places in '
                f"the messages; add the missing places, or name another field with --data.image_key"
            )

    def source(self, value: Any, *, where: str) -> ImageSource:
        if isinstance(
            value, Mapping
        ):  # OpenAI's {"url": ...} and Hugging Face's image feature {"bytes": ..., "path": ...}
            value = next((value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None)
        if isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        if not isinstance(value, (str, bytes, Image.Image)) or value in ("", b""):
            self.fail(
                f"{where} holds no image: a path, file:// or http(s) URL, data URI, base64 text, bytes or a PIL image "
                f"is needed, not {type(value).__name__}"
            )
        return resolve(value, base_dir=self.base_dir)

    def pixels(self, part: Mapping[str, Any], key: str, *, where: str) -> int | None:
        value = part.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or value % 1 != 0 or value < 1:
            self.fail(f"{where} has {key} {value!r}; a whole number of pixels, 1 or more, is needed")
        return int(value)

    def answer(self, record: Mapping[str, Any], *, key: str, required: bool) -> str:
        value = record.get(key)
        if isinstance(value, float) and math.isnan(value):  # how pandas writes a missing value
            value = None
        if value is None or (isinstance(value, str) and not value.strip()):
            if not required:
                return ""
            state = "is empty" if key in record else f"is missing (found: {', '.join(record)})"
            self.fail(f'the answer "{key}" {state}; fill it in, or name another field with --data.label_key')
        if isinstance(value, bool) or not isinstance(value, (str, numbers.Number)):
            self.fail(f'the answer "{key}" must be text or a number, not {type(value).__name__}')
        return str(value)
