"""The row schema: chat messages of text, image and video parts, with an answer; an image is a path, a URL, base64 text or bytes."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from PIL import Image, UnidentifiedImageError

from lmm_r1.data.media_access import media_limits
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A value of a row file, in a memory map; equal if the bytes are.

    Copies share it. Pickling sends the bytes, because another machine may not have the file.
    """

    data: pyarrow.Buffer
    _: KW_ONLY
    file: str = field(compare=False)
    """The user's name for the rows, for messages."""
    row: int = field(compare=False)
    """The row in the file, from 1, for messages."""

    @property
    def length(self) -> int:
        return self.data.size

    def read(self) -> bytes:
        return self.data.to_pybytes()

    def __hash__(self) -> int:
        return self.length

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.read(),)

    def __copy__(self) -> StoredBytes:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredBytes:
        return self


ImageSource = str | bytes | StoredBytes | Image.Image
SourceKind = Literal["path", "url", "base64", "bytes", "pil"]
# A longer string is base64: no path on the supported systems has more characters.
_LONGEST_PATH = 4096
_SHORTEST_BASE64 = 64
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")
# The limit of `open_image` is checked instead.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The image formats that are opened, by Pillow's names; other decoders are not run on downloaded data."""
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, EOFError)
DECODE_ERRORS = (*_BROKEN, struct.error, zlib.error, Image.DecompressionBombError)
"""What Pillow raises on damaged files."""


# The first characters of base64 of PNG, JPEG, GIF, WebP, BMP and TIFF (both byte orders).
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")


def kind_of(source: ImageSource) -> SourceKind:
    """Return which of the five forms `source` has; `file://` is a path, a data URI base64, and stored bytes are bytes."""
    if isinstance(source, Image.Image):
        return "pil"
    if isinstance(source, bytes | StoredBytes):
        return "bytes"
    if source.startswith(("http://", "https://")):
        return "url"
    if source.startswith("data:") or len(source) > _LONGEST_PATH:
        return "base64"
    is_base64 = (
        len(source) >= _SHORTEST_BASE64
        and source.startswith(_BASE64_STARTS)
        and _BASE64_TEXT.fullmatch(source) is not None
        and not os.path.exists(source)
    )
    return "base64" if is_base64 else "path"


def resolve(source: ImageSource, *, base_dir: Path) -> ImageSource:
    """Return `source` with a local path made absolute against `base_dir`; any other form is returned unchanged."""
    if kind_of(source) != "path":
        return source
    path = str(source)
    if path.startswith("file://"):
        raw = path.removeprefix("file://").removeprefix("localhost")
        # Some writers percent-encode file URLs and some do not; a file that exists under the raw name is meant.
        path = raw if os.path.exists(base_dir / raw) else unquote(raw)
    return os.path.abspath(base_dir / path)


def decode_base64(text: str) -> bytes:
    """Return the bytes of a data URI or of bare base64 text (standard or URL-safe); raises ValueError if it is invalid."""
    if text.startswith("data:"):
        header, comma, text = text.partition(",")
        if not comma or not header.endswith(";base64"):
            raise ValueError("the data URI is not of the form data:image/...;base64,...")
    compact = "".join(text.split()).translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the text is not base64 ({error})") from error


def open_image(file: IO[bytes]) -> Image.Image:
    """Return an image of one of `FORMATS`, not yet decoded.

    Raises what Pillow does, OSError for another format, and ValueError for more pixels than `MediaLimits` allow.
    """
    limits = media_limits()
    if Image.MAX_IMAGE_PIXELS is not None and limits.max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = limits.max_pixels
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise OSError(f"it has none of the formats {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"it has more than {limits.max_megapixels:g} megapixels, the most that are decoded"
        ) from error
    if image.width * image.height > limits.max_pixels:
        raise ValueError(
            f"it has {image.width}x{image.height} pixels, more than the {limits.max_megapixels:g} megapixels that are "
            "decoded at most (LMM_R1_MAX_IMAGE_MEGAPIXELS)"
        )
    return image


def describe(source: ImageSource) -> str:
    """Return a short name: paths and URLs unchanged, others as `<image WxH>` (or the size in bytes if unreadable)."""
    kind = kind_of(source)
    if isinstance(source, Image.Image):
        return f"<image {source.width}x{source.height}>"
    if kind in ("path", "url"):
        return str(source)
    if isinstance(source, StoredBytes):
        source = source.read()
    try:
        data = source if isinstance(source, bytes) else decode_base64(source)
    except ValueError:
        return f"<image as text, {len(source)} characters>"
    try:
        with open_image(io.BytesIO(data)) as image:
            return f"<image {image.width}x{image.height}>"
    except DECODE_ERRORS:
        return f"<image, {len(data)} bytes>"


ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class TextPart:
    text: str
    _: KW_ONLY
    template: str = field(default="{}", compare=False)
    """For a plain prompt: what the run writes around the row's own text, which replaces {}."""


@dataclass(frozen=True)
class ImagePart:
    source: ImageSource
    """Absolute path, http(s) URL, data URI, base64 text, encoded bytes (in memory or in the row file) or a PIL image."""
    _: KW_ONLY
    min_pixels: int | None = None
    """The image processor scales the image up to at least this many pixels; None leaves it to the model's default."""
    max_pixels: int | None = None
    """The image processor scales the image down to at most this many pixels; None leaves it to the model's default."""


@dataclass(frozen=True)
class VideoPart:
    source: str | tuple[ImageSource, ...]
    """Absolute path of a video file, or its sampled frames as images."""
    _: KW_ONLY
    fps: float | None = None
    """Frames taken per second of a file; for a list of frames, how many of them show one second."""
    max_frames: int | None = None
    """At most this many frames are taken, evenly spaced."""
    min_pixels: int | None = None
    """Each frame is scaled up to at least this many pixels, if the model's processor allows it."""
    max_pixels: int | None = None
    """Each frame is scaled down to at most this many pixels, if the model's processor allows it."""


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, kw_only=True)
class Message:
    role: str
    """One of `ROLES`."""
    parts: tuple[Part, ...]
    loss: bool | None = None
    """Whether the row says that SFT trains on the turn, or does not; None if it does not say."""


@dataclass(frozen=True, kw_only=True)
class ThinkingMessage(Message):
    """A turn of the model as some chat templates take it: its thought is not in its parts, as it is in rows."""

    thought: str


@dataclass(frozen=True, kw_only=True)
class Row:
    messages: tuple[Message, ...]
    answer: str
    """The gold answer for the reward; empty only if the caller did not require one."""
    datasource: str
    location: str
    """File and line, for error messages."""
    response: Message | None = None
    """The assistant turn that SFT trains on, which follows the messages; None if the format does not separate them."""
    prefill: str = ""
    """How every response begins: the model continues it, and the scored text includes it."""
    plain: bool = False
    """The text goes to the tokenizer without the chat template; such a row has no images or videos."""
    text_prompt: bool = field(default=False, compare=False)
    """The record's column `prompt` holds text instead of messages, as TRL's reward functions then get it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the record, except those of the prompt and its images and videos."""


@dataclass(frozen=True, kw_only=True)
class PreferenceRow:
    """A prompt with a better and a worse response, which differ and are not empty."""

    messages: tuple[Message, ...]
    """The prompt, with images and videos; the last turn is the user's or a tool's."""
    location: str
    """File and line, for error messages."""
    datasource: str = "default"
    """Metrics may be reported per value of it."""
    plain: bool = False
    """The text goes to the tokenizer without the chat template; such a row has no images or videos."""
    chosen: tuple[Message, ...]
    """The turns after the prompt; the first and the last are the assistant's."""
    rejected: tuple[Message, ...]
    margin: float | None
    """How much better the chosen one is, 0 or more (arXiv 2307.09288); None if the row does not say."""
    chosen_score: float | None = None
    """The score of a judge or a reward; None if the row does not say."""
    rejected_score: float | None = None

    @property
    def sides(self) -> tuple[Row, Row]:
        """The conversations that end with the chosen and with the rejected response."""
        return self._conversation(self.chosen), self._conversation(self.rejected)

    def _conversation(self, turns: tuple[Message, ...]) -> Row:
        return Row(
            messages=(*self.messages, *turns),
            answer="",
            datasource=self.datasource,
            location=self.location,
            plain=self.plain,
        )


BadRows = Literal["stop", "skip"]
"""Whether a file with bad rows is refused or read without them."""
NO_PROMPT = "none"
"""The value of a flag for a system prompt that adds none."""


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A row that was left out."""

    index: int
    """Its index among the records of its file, from 0."""
    reason: str
    """One sentence with the file and the line."""

    @property
    def finding(self) -> tuple[str, str]:
        """The location and what is wrong there."""
        location, _, what = " ".join(self.reason.split()).partition(": ")
        return location, what


def demonstration(row: Row) -> Row:
    """Return the row as SFT trains on it: its response is the last message."""
    if row.response is None:
        return row
    return replace(row, messages=(*row.messages, row.response), response=None, prefill="")


def as_prompt(row: Row) -> Row:
    """Return the row as RL samples from it: a final assistant turn of text, if it is the only one, becomes the response.

    With several assistant turns, the earlier ones may belong to the prompt, or all of them to an episode to train on. Such
    a row is returned unchanged.
    """
    *asked, last = row.messages
    turns = [message for message in row.messages if message.role == "assistant"]
    worked = row.response is None and not row.plain and bool(asked) and turns == [last]
    if not worked or not all(isinstance(part, TextPart) for part in last.parts):
        return row
    return replace(row, messages=tuple(asked), response=last)


def check_asks(row: Row) -> None:
    """Raise UserError for a row that a model cannot respond to."""
    if row.messages[-1].role == "assistant":
        raise UserError(f"{row.location}: the row ends with an assistant turn, so there is nothing to respond to")


def with_images(messages: Sequence[Message], change: Callable[[ImagePart], ImagePart]) -> tuple[Message, ...]:
    """Return the messages with each image part changed."""
    return tuple(
        replace(one, parts=tuple(change(part) if isinstance(part, ImagePart) else part for part in one.parts))
        for one in messages
    )


def merged_texts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return parts with neighbouring texts as one."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, TextPart) and merged and isinstance(merged[-1], TextPart):
            merged[-1] = TextPart(merged[-1].text + part.text)
        else:
            merged.append(part)
    return tuple(merged)


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    """Return every image part, in the order in which the model reads them."""
    return [part for message in messages for part in message.parts if isinstance(part, ImagePart)]


def videos_of(messages: Sequence[Message]) -> list[VideoPart]:
    """Return every video part, in the order in which the model reads them."""
    return [part for message in messages for part in message.parts if isinstance(part, VideoPart)]


def describe_video(part: VideoPart) -> str | list[str]:
    """Return the path of a video file; for frames, a list of paths and URLs, with other images as `<image WxH>`."""
    return part.source if isinstance(part.source, str) else [describe(frame) for frame in part.source]


def to_chat(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return the form for chat templates: `[text]` → `"text"`; `[image, text]` → `[{"type": "image"}, {"type": "text", ...}]`."""
    return [
        {"role": message.role, "content": _content(message, with_sources=False)}
        | ({"reasoning_content": message.thought} if isinstance(message, ThinkingMessage) else dict[str, object]())
        for message in messages
    ]


def to_json(messages: Sequence[Message]) -> str:
    """Return compact JSON with paths and URLs, and other images as `<image WxH>`; a video of frames is a list."""
    chat = [{"role": message.role, "content": _content(message, with_sources=True)} for message in messages]
    return json.dumps(chat, ensure_ascii=False, separators=(",", ":"))


def _content(message: Message, *, with_sources: bool) -> str | list[dict[str, object]]:
    if len(message.parts) == 1 and isinstance(message.parts[0], TextPart):
        return message.parts[0].text
    content: list[dict[str, object]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
            continue
        kind = "image" if isinstance(part, ImagePart) else "video"
        named = describe(part.source) if isinstance(part, ImagePart) else describe_video(part)
        content.append({"type": kind, **({kind: named} if with_sources else {})})
    return content
