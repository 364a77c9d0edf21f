"""The row schema: chat messages of text, image and video parts, with an answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from lmm_r1.data.image_sources import ImageSource, describe
from lmm_r1.errors import UserError

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
    rejected: Message | None = None
    """In a preference, the worse response; `response` is the better one."""
    prefill: str = ""
    """How every response begins: the model continues it, and the scored text includes it."""
    plain: bool = False
    """The text goes to the tokenizer without the chat template; such a row has no images or videos."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the record, except those of the prompt and its images and videos."""


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


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    """Return every image part, in the order in which the model reads them."""
    return [part for message in messages for part in message.parts if isinstance(part, ImagePart)]


def videos_of(messages: Sequence[Message]) -> list[VideoPart]:
    """Return every video part, in the order in which the model reads them."""
    return [part for message in messages for part in message.parts if isinstance(part, VideoPart)]


def describe_video(part: VideoPart) -> str | list[str]:
    """Return the path of a video file; for frames, a list of paths and URLs, with other images as `<image WxH>`."""
    return part.source if isinstance(part.source, str) else [describe(frame) for frame in part.source]


def to_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the form for chat templates: `[text]` → `"text"`; `[image, text]` → `[{"type": "image"}, {"type": "text", ...}]`."""
    return [{"role": message.role, "content": _content(message, with_sources=False)} for message in messages]


def to_json(messages: Sequence[Message]) -> str:
    """Return compact JSON with paths and URLs, and other images as `<image WxH>`; a video of frames is a list."""
    chat = [{"role": message.role, "content": _content(message, with_sources=True)} for message in messages]
    return json.dumps(chat, ensure_ascii=False, separators=(",", ":"))


def _content(message: Message, *, with_sources: bool) -> str | list[dict[str, Any]]:
    if len(message.parts) == 1 and isinstance(message.parts[0], TextPart):
        return message.parts[0].text
    content: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        else:
            kind = "image" if isinstance(part, ImagePart) else "video"
            content.append({"type": kind, **({kind: _described(part)} if with_sources else {})})
    return content


def _described(part: ImagePart | VideoPart) -> str | list[str]:
    return describe(part.source) if isinstance(part, ImagePart) else describe_video(part)
