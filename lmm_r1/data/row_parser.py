"""From a record of a row file to a validated row, with the location in every error; and from messages back to JSON."""

from __future__ import annotations

import base64
import io
import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image

from lmm_r1.data.formats import OWN
from lmm_r1.data.formats.row_format import (
    IMAGE_SOURCES,
    MEDIA_PART,
    MESSAGE,
    ROW,
    TEXT_PART,
    THOUGHTS,
    VIDEO_SOURCES,
    AskedFields,
    Column,
    ColumnNames,
    Columns,
    RowFields,
    RowFormat,
    as_thought,
    check_keys,
    is_empty,
    loss_mark,
    media_entries,
    text_of_number,
)
from lmm_r1.data.images import check_image_exists, check_video_exists
from lmm_r1.data.media_access import is_below, media_roots
from lmm_r1.data.messages import (
    ROLES,
    ImagePart,
    ImageSource,
    Message,
    Part,
    Row,
    StoredBytes,
    TextPart,
    VideoPart,
    describe,
    kind_of,
    open_image,
    resolve,
)
from lmm_r1.errors import UserError

VIDEO_SETTINGS = ("fps", "max_frames", "min_pixels", "max_pixels")
OWN_NAMES = ColumnNames(answer="answer", images="images", videos="videos")
"""The columns of this project's own format."""
ASKED_NAMES = replace(OWN_NAMES, asked_only=True)
"""The same for prompts that nothing is trained on."""
IMAGE_TAG = "<image>"
VIDEO_TAG = "<video>"
# A string is read as JSON messages only if it opens like them; "[1, 2] sort these" stays a plain prompt.
_JSON_MESSAGES = re.compile(r'\s*\[?\s*\{.*"role"', re.DOTALL)
_TAGS = re.compile(f"({re.escape(IMAGE_TAG)}|{re.escape(VIDEO_TAG)})")
_KINDS: dict[type[Part], str] = {ImagePart: IMAGE_TAG, VideoPart: VIDEO_TAG}
# JSON can contain lone surrogates, which no tokenizer accepts.
_SURROGATE = re.compile("[\ud800-\udfff]")
_MEDIA_COLUMNS = {"image": ImagePart, "images": ImagePart, "video": VideoPart, "videos": VideoPart}


def parse_row(
    record: Mapping[str, Any],
    *,
    location: str,
    base_dir: Path,
    row_format: RowFormat[RowFields] = OWN,
    format_is_named: bool = False,
    names: ColumnNames = OWN_NAMES,
    plain_template: str | None = None,
    answer_required: bool = True,
    media_required: bool = False,
    roots: Sequence[Path] | None = None,
) -> Row:
    """Return the validated row of a record, by default in this project's own format; relative paths start at `base_dir`.

    Args:
        names: the columns; the prompt is a list of messages, its JSON text, or text that becomes one user turn. None looks
            for it in the format's own.
        plain_template: what surrounds a plain prompt, which replaces {}: the row is plain then. None applies the chat
            template to plain prompts.
        media_required: also raise UserError for a local image or video that is missing or damaged.
        roots: the folders below which files may be named; None takes those of `media_roots`.

    Raises:
        UserError: the record breaks the schema; the message begins with `location`.
    """
    columns = Columns(record, location=location, names=names, format_is_named=format_is_named)
    fields = row_format.adapt(columns)
    output = None if names.response is None else columns.take(names.response)
    check_keys(ROW, columns.rest(), columns)
    parser = RecordParser(fields, columns, base_dir, roots=roots)
    messages, plain = parser.prompt(fields.messages, plain_template=plain_template)
    # Before the response, which may be the same field: this message says what an answer must be.
    answer = parser.answer(fields.answer, found=record, required=answer_required)
    response = parser.response(fields.response)
    if output is not None:
        messages = (*messages, *parser.output(output, found=record, plain=plain))
        response = None
    parser.finish()
    check_shown(messages, columns)
    if media_required:
        parser.check_media()
    return Row(
        messages=messages,
        answer=answer,
        datasource=fields.datasource,
        location=location,
        response=response,
        prefill=fields.prefill,
        plain=plain,
        text_prompt=columns.prompt_column == "prompt" and _is_plain(columns.value("prompt")),
        columns=columns.outside_prompt(),
    )


def check_shown(messages: Sequence[Message], columns: Columns) -> None:
    """Raise UserError if a usual media column is filled, but neither the format nor the messages use it."""
    shown = {type(part) for message in messages for part in message.parts}
    for name, value in columns.rest().items():
        kind = _MEDIA_COLUMNS.get(name)
        if kind is not None and kind not in shown and media_entries(Column(name=name, value=value)):
            columns.fail(
                f'the field "{name}" is filled, but the prompt does not show it; name the field with '
                f"{columns.names.flag('image_key')}, choose another row format with {columns.names.flag('format')}, or empty it"
            )


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and not _JSON_MESSAGES.match(value)


class _MediaField:
    """The entries of a record's field for images or videos, used in order."""

    def __init__(self, kind: str, *, key: str, entries: list[Any]) -> None:
        self.kind = kind
        self.key = key
        self.entries = entries
        self.used = 0

    @property
    def tag(self) -> str:
        return f"<{self.kind}>"

    @property
    def place(self) -> str:
        """Where the last used entry is."""
        return f'"{self.key}" entry {self.used}'


class RecordParser:
    """Reads one record: media fields fill the places for media in order; every error starts with the location."""

    def __init__(
        self, fields: AskedFields, columns: Columns, base_dir: Path, *, roots: Sequence[Path] | None = None
    ) -> None:
        self.columns = columns
        self.location = columns.location
        self.names = columns.names
        self.base_dir = base_dir
        self.roots = media_roots(base_dir) if roots is None else roots
        self.prompt_column = columns.prompt_column
        self.images = _MediaField("image", key=fields.images.name, entries=media_entries(fields.images))
        self.videos = _MediaField("video", key=fields.videos.name, entries=media_entries(fields.videos))
        unfilled = not self.images.entries and not self.videos.entries and all(map(is_empty, columns.rest().values()))
        self._tags_are_text = self.names.asked_only and unfilled
        self._media: list[tuple[ImagePart | VideoPart, str]] = []

    def fail(self, sentence: str) -> NoReturn:
        raise UserError(f"{self.location}: {sentence}")

    def prompt(self, value: Any, *, plain_template: str | None) -> tuple[tuple[Message, ...], bool]:
        """Return the prompt, and whether it is plain text, which then has the template around it."""
        if plain_template is None or not _is_plain(value):
            return self.messages(value), False
        return (self.plain_prompt(value, template=plain_template),), True

    def messages(self, value: Any, *, column: str | None = None) -> tuple[Message, ...]:
        """Return the messages of a list or of its JSON text.

        Args:
            column: the column that holds it; None is the prompt's.
        """
        column = column or self.prompt_column
        if _is_plain(value):
            return (self.message({"role": "user", "content": value}, where=f'the prompt "{self.prompt_column}"'),)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                self.fail(f'the messages in "{column}" are not valid JSON: {error}')
        if not isinstance(value, Sequence) or not value:
            self.fail(f'the messages in "{column}" must be a list with at least one message, or JSON text of one')
        return tuple(
            self.message(item, where=f'message {number} of "{column}"', is_last=number == len(value))
            for number, item in enumerate(value, start=1)
        )

    def plain_prompt(self, text: str, *, template: str) -> Message:
        """Return the text in the template; tags stay text, and images are not possible."""
        if self.images.entries or self.videos.entries or _TAGS.search(text):
            self.fail(
                "a plain-text prompt with images or videos needs a chat template; add --data.apply_chat_template"
            )
        if not text.strip():
            self.fail(f'the text "{self.prompt_column}" is empty')
        self.check_characters(text, where=f'the text "{self.prompt_column}"')
        return Message(role="user", parts=(TextPart(template.replace("{}", text), template=template),))

    def output(self, field: Column, *, found: Mapping[str, Any], plain: bool) -> tuple[Message, ...]:
        """Return the response in a field of its own; a text becomes an assistant turn."""
        key, value = field.name, field.value
        if value is None and key in found:
            self.fail(f'the response "{key}" is empty; fill it in, or name another field with --data.output_key')
        if value is None:
            self.fail(
                f'no field "{key}" with the response (found: {", ".join(found)}); name it with --data.output_key'
            )
        if _is_plain(value):
            return (self.message({"role": "assistant", "content": value}, where=f'the response "{key}"'),)
        if plain:
            self.fail(f'the prompt is plain text and the response "{key}" is not; add --data.apply_chat_template')
        return self.messages(value, column=key)

    def message(self, item: Any, *, where: str, is_last: bool = True) -> Message:
        """Args: is_last: no turn follows, so that an empty one would say nothing."""
        if not isinstance(item, Mapping):
            self.fail(f'{where} must be an object with "role" and "content", not {type(item).__name__}')
        role = item.get("role")
        if role not in ROLES:
            self.fail(f"{where} has the role {role!r}; known roles are {', '.join(ROLES)}")
        check_keys(MESSAGE, item, self.columns, where=f"{where} ({role})")
        content = item.get("content")
        if self.names.asked_only and role == "assistant":
            content = content or ""
        if isinstance(content, str):
            parts: list[Part] = [TextPart(content)] if role == "assistant" else self.tagged(content)
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            parts = [self.part(part, where=f"{where}, part {number}") for number, part in enumerate(content, start=1)]
        else:
            self.fail(f'{where} ({role}) needs a "content" that is text or a list of parts')
        parts = self.with_thought(parts, item, where=f"{where} ({role})")
        loss = loss_mark(item, self.columns, where=f"{where} ({role})")
        if not any(not isinstance(part, TextPart) or part.text.strip() for part in parts):
            if (is_last or role == "user") and not self.names.asked_only:
                self.fail(f"{where} ({role}) is empty")
            # An empty system turn switches off the template's own.
            parts = parts or [TextPart("")]
            loss = bool(loss) if role == "assistant" and not self.names.asked_only else loss
        for part in parts:
            if isinstance(part, TextPart):
                self.check_characters(part.text, where=f"{where} ({role})")
        return Message(role=role, parts=tuple(parts), loss=loss)

    def with_thought(self, parts: list[Part], item: Mapping[str, Any], *, where: str) -> list[Part]:
        """Return the parts of a message after its thought in a key of its own; raises UserError for two thoughts."""
        found = {key: item[key] for key in THOUGHTS if not is_empty(item.get(key))}
        if not found:
            return parts
        key, thought = next(iter(found.items()))
        if item["role"] != "assistant" or not all(isinstance(one, str) for one in found.values()):
            self.fail(f'{where} has "{key}", which must be the text of an assistant\'s thought; remove it')
        text, rest = (parts[0].text, parts[1:]) if parts and isinstance(parts[0], TextPart) else ("", parts)
        has_own = text.lstrip().startswith("<think>")
        if any(one.strip() not in (text if has_own else thought) for one in found.values()):
            self.fail(f'{where} has two thoughts, in "{key}" and elsewhere; keep one')
        return parts if has_own else [TextPart(as_thought(thought) + text), *rest]

    def check_characters(self, text: str, *, where: str) -> None:
        """Raise UserError for a lone surrogate, which would end a training with a traceback."""
        half = _SURROGATE.search(text)
        if half is not None:
            self.fail(f"{where} holds half of a character, {half[0]!r}; correct it")

    def tagged(self, text: str) -> list[Part]:
        """Replace tags by media: `"<image>\\nFind x."` → the next image, then the text `"Find x."`."""
        if _TAGS.search(text) is None or self._tags_are_text:
            return [TextPart(text)]
        parts: list[Part] = []
        for piece in _TAGS.split(text):
            if piece in (IMAGE_TAG, VIDEO_TAG):
                parts.append(self.media({"type": piece.strip("<>")}, where=self.prompt_column))
            elif piece.strip():
                parts.append(TextPart(piece.strip()))
        return parts

    def part(self, part: Any, *, where: str) -> Part:
        if not isinstance(part, Mapping):
            self.fail(f'{where} must be an object with a "type", not {type(part).__name__}')
        kind = part.get("type")
        if kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                self.fail(f'{where} has the type "text" but no "text" string')
            check_keys(TEXT_PART, part, self.columns, where=where)
            return TextPart(text)
        if kind in ("image", "image_url", "video", "video_url"):
            return self.media(part, where=where)
        self.fail(f"{where} has the type {kind!r}; known types are text, image, image_url, video, video_url")

    def media(self, part: Mapping[str, Any], *, where: str) -> ImagePart | VideoPart:
        """Return an image or a video with its settings; without a source it is the media field's next entry."""
        is_image = part["type"].startswith("image")
        field, sources = (self.images, IMAGE_SOURCES) if is_image else (self.videos, VIDEO_SOURCES)
        value = next((part[key] for key in sources if not is_empty(part.get(key))), None)
        place = where
        if value is None:
            value = self.next_entry(field)
            place = field.place
        # OpenAI's {"url": ...}, Hugging Face's {"bytes": ..., "path": ...}, and entries that are parts, as in verl.
        while isinstance(value, Mapping):
            part = {**value, **{key: given for key, given in part.items() if given is not None}}
            value = next((value[key] for key in sources if not is_empty(value.get(key))), None)
        check_keys(MEDIA_PART, part, self.columns, where=place)
        bounds = self.pixel_bounds(part, where=where)
        if is_image:
            seen: ImagePart | VideoPart = ImagePart(self.image(value, where=place), **bounds)
        else:
            frames = self.whole_number(part, "max_frames", where=where)
            fps, source = self.number(part, "fps", where=where), self.video(value, where=place)
            seen = VideoPart(source, fps=fps, max_frames=frames, **bounds)
        self._media.append((seen, place))
        return seen

    def next_entry(self, field: _MediaField) -> Any:
        if field.used == len(field.entries):
            self.fail(
                f'more "{field.tag}" places in "{self.prompt_column}" than the {len(field.entries)} {field.kind}s in the field '
                f'"{field.key}"; add the missing {field.kind}s{self._other_field(field)}'
            )
        field.used += 1
        return field.entries[field.used - 1]

    def finish(self) -> None:
        """Raise UserError if an entry of a media field was not used."""
        for field in (self.images, self.videos):
            if field.used < len(field.entries):
                self.fail(
                    f'{len(field.entries)} {field.kind}s in the field "{field.key}" but {field.used} "{field.tag}" '
                    f'places in "{self.prompt_column}"; add the missing places{self._other_field(field)}'
                )

    def check_media(self) -> None:
        """Raise UserError, with the place in the record, for a local image or video that is missing or damaged."""
        for part, where in self._media:
            try:
                if isinstance(part, ImagePart):
                    check_image_exists(part, location=self.location)
                else:
                    check_video_exists(part, location=self.location)
            except UserError as error:
                raise UserError(f"{error} (in {where})") from error

    def _other_field(self, field: _MediaField) -> str:
        """Return the other way to resolve a mismatch, if a flag names the field."""
        return f", or name another field with {self.names.flag('image_key')}" if field.kind == "image" else ""

    def image(self, value: Any, *, where: str) -> ImageSource:
        if isinstance(value, Mapping):
            value = next((value[key] for key in IMAGE_SOURCES if not is_empty(value.get(key))), None)
        if isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        if not isinstance(value, (str, bytes, StoredBytes, Image.Image)) or value in ("", b""):
            self.fail(
                f"{where} is not an image: it must be a path, file:// or http(s) URL, data URI, base64 text, bytes or a PIL "
                f"image, not {type(value).__name__}"
            )
        return self.allowed(value)

    def allowed(self, value: ImageSource) -> ImageSource:
        """Return a source with a local path made absolute; raises UserError for one that the row may not name."""
        source = resolve(value, base_dir=self.base_dir)
        if self.roots is None or kind_of(source) != "path" or is_below(str(source), self.roots):
            return source
        self.fail(
            f"the file {describe(source)} is not below {' or '.join(map(str, self.roots))}: rows of a downloaded dataset may name no "
            f"other files; if you trust this one, give the folder of the file with {self.names.flag('image_dir')}"
        )

    def video(self, value: Any, *, where: str) -> str | tuple[ImageSource, ...]:
        if isinstance(value, str) and value and kind_of(value) == "path":
            return str(self.allowed(value))
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value:
            return tuple(self.image(frame, where=f"{where}, frame {at}") for at, frame in enumerate(value, start=1))
        given = (
            "a URL" if isinstance(value, str) and value.startswith(("http://", "https://")) else type(value).__name__
        )
        self.fail(
            f"{where} is not a video: it must be the path or file:// URL of a video file, or a list of frame images, not "
            f"{given}"
        )

    def pixel_bounds(self, part: Mapping[str, Any], *, where: str) -> dict[str, int | None]:
        lowest, highest = (self.whole_number(part, key, where=where) for key in ("min_pixels", "max_pixels"))
        if lowest is not None and highest is not None and lowest > highest:
            self.fail(f"{where} has min_pixels {lowest} above max_pixels {highest}")
        return {"min_pixels": lowest, "max_pixels": highest}

    def number(self, part: Mapping[str, Any], key: str, *, where: str) -> float | None:
        """Return a number above 0, None if there is none."""
        value = part.get(key)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (number and value > 0):
            self.fail(f"{where} has {key} {value!r}; it must be a number above 0")
        return None if value is None else float(value)

    def whole_number(self, part: Mapping[str, Any], key: str, *, where: str) -> int | None:
        value = self.number(part, key, where=where)
        if value is not None and value % 1:
            self.fail(f"{where} has {key} {value!r}; it must be a whole number")
        return None if value is None else int(value)

    def answer(self, column: Column, *, found: Mapping[str, Any], required: bool) -> str:
        value = column.value
        if value is None or (isinstance(value, str) and not value.strip()):
            if not required:
                return ""
            state = "is empty" if column.name in found else f"is missing (found: {', '.join(found)})"
            self.fail(
                f'the answer "{column.name}" {state}; fill it in, or name another field with {self.names.flag("label_key")}'
            )
        if isinstance(value, bool) or not isinstance(value, (str, numbers.Number)):
            self.fail(f'the answer "{column.name}" must be text or a number, not {type(value).__name__}')
        return value if isinstance(value, str) else text_of_number(value)

    def response(self, column: Column) -> Message | None:
        value = column.value
        if value is None:
            return None
        if isinstance(value, numbers.Number) and not isinstance(value, bool):
            value = text_of_number(value)
        return self.message(
            value if isinstance(value, Mapping) else {"role": "assistant", "content": value},
            where=f'the response "{column.name}"',
        )


def tagged_text(message: Message) -> str:
    """Return a message's text with tags for its images and videos: [image, "Find x."] -> "<image>Find x."."""
    return "".join(part.text if isinstance(part, TextPart) else _KINDS[type(part)] for part in message.parts)


def parts_of(text: str, message: Message, *, location: str) -> tuple[Part, ...]:
    """Return the parts of a text in which tags mark the images and videos of a message, in order.

    Raises:
        UserError: the text does not have exactly one tag for each of them, or is blank.
    """
    media: dict[str, list[Part]] = {
        tag: [part for part in message.parts if isinstance(part, kind)] for kind, tag in _KINDS.items()
    }
    pieces = [piece for piece in _TAGS.split(text) if piece.strip()]
    if not pieces or any(pieces.count(tag) != len(parts) for tag, parts in media.items()):
        raise UserError(
            f"{location}: the prompt's template must write a text, and one tag for each image and video of the prompt"
        )
    is_text = not any(media.values())
    return tuple(media[one].pop(0) if one in media else TextPart(one if is_text else one.strip()) for one in pieces)


def stored_messages(messages: Sequence[Message], *, keep_pictures: bool = False) -> list[dict[str, object]]:
    """Return messages in the form that `parse_row` reads; images that are not text become data URIs.

    With `keep_pictures`, PIL images are kept for `write_row_folder`.
    """
    return [
        {"role": message.role, "content": _stored_content(message, keep_pictures=keep_pictures)}
        | ({} if message.loss is None else {"loss": message.loss})
        for message in messages
    ]


def _stored_content(message: Message, *, keep_pictures: bool) -> str | list[dict[str, object]]:
    parts = message.parts
    # In a message of one text, tags mark images; in a part of its own, they are plain text.
    if len(parts) == 1 and isinstance(parts[0], TextPart) and not _TAGS.search(parts[0].text):
        return parts[0].text
    content: list[dict[str, object]] = []
    for part in parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
            continue
        if isinstance(part, ImagePart):
            kept = keep_pictures and isinstance(part.source, Image.Image)
            stored: dict[str, object] = {"image": part.source if kept else _stored_source(part.source)}
        else:
            frames = part.source if isinstance(part.source, str) else [_stored_source(frame) for frame in part.source]
            stored = {"video": frames}
        settings = ("min_pixels", "max_pixels") if isinstance(part, ImagePart) else VIDEO_SETTINGS
        given = {name: value for name in settings if (value := getattr(part, name)) is not None}
        content.append({"type": next(iter(stored)), **stored, **given})
    return content


def _stored_source(source: ImageSource) -> str:
    if isinstance(source, str):
        return source
    if isinstance(source, StoredBytes):
        source = source.read()
    if isinstance(source, Image.Image):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        source = buffer.getvalue()
    with open_image(io.BytesIO(source)) as image:
        assert image.format is not None, "it was opened from bytes"
        mime_type = Image.MIME[image.format]
    return f"data:{mime_type};base64,{base64.b64encode(source).decode('ascii')}"
