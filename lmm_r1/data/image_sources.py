"""What an image source may be (path, URL, base64 text, bytes here or in a row file, PIL image), where a local one lies."""

import base64
import binascii
import io
import os
import re
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote

from PIL import Image, UnidentifiedImageError

from lmm_r1.data.stored_bytes import StoredBytes

ImageSource = str | bytes | StoredBytes | Image.Image
SourceKind = Literal["path", "url", "base64", "bytes", "pil"]

# No file name holds more characters than this on the systems we run on, so a longer string is base64.
_LONGEST_PATH = 4096
_SHORTEST_BASE64 = 64
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Image formats that are opened, by Pillow's names: a decoder that no training needs is not run on downloaded data."""
# How base64 of PNG, JPEG, GIF, WebP, BMP and TIFF (both byte orders) begins.
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")


def kind_of(source: ImageSource) -> SourceKind:
    """Which of the five forms `source` has; `file://` counts as a path, a data URI as base64, and stored bytes are bytes."""
    if isinstance(source, Image.Image):
        return "pil"
    if isinstance(source, bytes | StoredBytes):
        return "bytes"
    if source.startswith(("http://", "https://")):
        return "url"
    if source.startswith("data:") or _is_bare_base64(source):
        return "base64"
    return "path"


def _is_bare_base64(text: str) -> bool:
    if len(text) > _LONGEST_PATH:
        return True
    return (
        len(text) >= _SHORTEST_BASE64
        and text.startswith(_BASE64_STARTS)
        and _BASE64_TEXT.fullmatch(text) is not None
        and not os.path.exists(text)
    )


def resolve(source: ImageSource, *, base_dir: Path) -> ImageSource:
    """`source` with a local path made absolute against `base_dir`; every other form is returned unchanged."""
    if kind_of(source) != "path":
        return source
    return os.path.abspath(base_dir / _strip_scheme(str(source), base_dir=base_dir))


def _strip_scheme(source: str, *, base_dir: Path) -> str:
    if not source.startswith("file://"):
        return source
    raw = source[len("file://") :].removeprefix("localhost")
    # Some writers percent-encode file URLs and some do not; a file that is there under its raw name is the one meant.
    return raw if os.path.exists(base_dir / raw) else unquote(raw)


def decode_base64(text: str) -> bytes:
    """The bytes of a data URI or of bare base64 text (standard or URL-safe); raises ValueError if it is not base64."""
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
    """Return an image of one of `FORMATS`, not decoded yet; raises what Pillow does, OSError for another format."""
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise OSError(f"it is none of the formats {', '.join(FORMATS)}") from error


def describe(source: ImageSource) -> str:
    """A short name: paths and URLs as they are, everything else as `<image WxH>` (or its size in bytes, if unreadable)."""
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
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return f"<image, {len(data)} bytes>"
