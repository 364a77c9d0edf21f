"""Images and videos that the user attaches to the next message: typed, pasted or dragged paths, and URLs."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lmm_r1.chat.screen import one_line
from lmm_r1.data.image_sources import describe, kind_of, resolve
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, VideoPart
from lmm_r1.data.videos import load_video
from lmm_r1.errors import UserError

_QUOTES = "'\""
_PATH_STARTS = ("/", "~", "./", "../", "file://", *_QUOTES)


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """What goes with the next message."""

    name: str
    size: str
    """For the user: `640x480`."""
    part: ImagePart | VideoPart

    def __str__(self) -> str:
        return f"{self.name} ({self.size})"


def sources_of(argument: str) -> list[str]:
    """Return the paths and URLs in what was typed or dragged: one as it is, or several apart by spaces or quotes.

    A path with spaces needs no quotes where it exists: `my picture.png` is one, `a.png b.png` are two.
    """
    whole = argument.strip()
    if not whole:
        raise UserError("give the path or the URL of a file")
    if _exists(_expanded(whole)):
        return [_expanded(whole)]
    try:
        pieces = [_expanded(piece) for piece in shlex.split(whole)]
    except ValueError:  # an unclosed quote, as in `Anna's.png`
        return [_expanded(whole)]
    known = any(_exists(piece) or kind_of(piece) != "path" for piece in pieces)
    return pieces if pieces and (known or len(pieces) == 1 or whole[0] in _QUOTES) else [_expanded(whole)]


def dragged_image(line: str) -> str | None:
    """Return the path of an image file that a line consists of, as terminals write one that is dropped on them."""
    text = line.strip()
    if not text.startswith(_PATH_STARTS) or "\n" in text:
        return None
    sources = sources_of(text)
    suffix = os.path.splitext(sources[0])[1].lower()
    return sources[0] if len(sources) == 1 and suffix in _image_suffixes() and _exists(sources[0]) else None


def read_image(source: str) -> Attachment:
    """Return an image, decoded once to know that it is one; one from a URL is kept, as it need not stay there.

    Raises UserError for an image that is missing or broken.
    """
    try:
        image = load_image(ImagePart(source), location="the image")
    except UserError as error:
        raise UserError(_image_reason(one_line(describe(source)), error.__cause__)) from error
    kept = image if kind_of(source) == "url" else resolve(source, base_dir=Path.cwd())
    return Attachment(name=one_line(_name(source)), size=f"{image.width}x{image.height}", part=ImagePart(kept))


def read_video(source: str) -> Attachment:
    """Return a video, decoded once to know that it is one; raises UserError where it is missing or broken."""
    if kind_of(source) != "path":
        raise UserError(f"{one_line(describe(source))}: a video must be a file on this machine")
    file = str(resolve(source, base_dir=Path.cwd()))
    part = VideoPart(file)
    if not Path(file).is_file():
        raise UserError(f"no video file {one_line(source)}; check the path")
    frames = load_video(part, location="the video").frames
    size = f"{frames.shape[2]}x{frames.shape[1]}, {len(frames)} frames"
    return Attachment(name=one_line(_name(source)), size=size, part=part)


def _expanded(path: str) -> str:
    return os.path.expanduser(path)


def _exists(path: str) -> bool:
    if kind_of(path) != "path" or "\0" in path:
        return False
    return os.path.exists(str(resolve(path, base_dir=Path.cwd())))


def _name(source: str) -> str:
    return (
        os.path.basename(str(resolve(source, base_dir=Path.cwd()))) if kind_of(source) == "path" else describe(source)
    )


def _image_reason(name: str, cause: BaseException | None) -> str:
    if isinstance(cause, FileNotFoundError):
        return f"no image file {name}; check the path"
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
    return f"cannot read the image {name}: {one_line(str(reason))}"


def _image_suffixes() -> frozenset[str]:
    return frozenset(Image.registered_extensions())
