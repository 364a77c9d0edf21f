"""Images of rows: reading, decoding, checking, and writing them to files."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import re
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import tenacity
from PIL import ExifTags, Image, ImageOps

from lmm_r1.data.image_sources import StoredBytes, decode_base64, describe, kind_of, open_image, resolve
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_bytes_atomically

_TIMEOUT_SECONDS = 30.0
_DOWNLOAD_ATTEMPTS = 3
# What the last bytes of a complete file contain, by the format's name in Pillow.
_ENDINGS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9"}
_TAIL_BYTES = 16
# EXIF orientations that swap width and height.
_LYING = (5, 6, 7, 8)
# What Pillow's decoders raise on damaged files in addition to OSError (which includes UnidentifiedImageError).
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def load_image(part: ImagePart, *, location: str) -> Image.Image:
    """Return the image in RGB, decoded and turned upright by its EXIF tag; transparent pixels become white.

    Raises:
        UserError: the image is missing, cannot be fetched or cannot be decoded (names `location` and the image), or
            the row file that holds it has changed.
    """
    source = part.source.read() if isinstance(part.source, StoredBytes) else part.source
    try:
        image = source if isinstance(source, Image.Image) else open_image(io.BytesIO(_read(source)))
        image.load()
        # exif_transpose always copies, so no caller changes an image that the row holds.
        return _to_rgb(ImageOps.exif_transpose(_in_eight_bits(image)))
    except _DECODE_ERRORS as error:
        raise _image_error(replace(part, source=source), location=location, error=error) from error


def encoded_image(part: ImagePart, *, location: str) -> bytes:
    """Return the image as it is stored, in any format; an image held as pixels becomes a PNG.

    Raises:
        UserError: the image is missing or cannot be fetched (names `location` and the image), or the row file that
            holds it has changed.
    """
    source = part.source.read() if isinstance(part.source, StoredBytes) else part.source
    try:
        if not isinstance(source, Image.Image):
            return _read(source)
        buffer = io.BytesIO()
        source.save(buffer, "PNG")
        return buffer.getvalue()
    except _DECODE_ERRORS as error:
        raise _image_error(replace(part, source=source), location=location, error=error) from error


def fetched(part: ImagePart, *, location: str) -> ImagePart:
    """Return the part with the encoded bytes instead of a URL; any other part is returned unchanged.

    Raises:
        UserError: the image cannot be fetched; names `location` and the image.
    """
    if not isinstance(part.source, str) or kind_of(part.source) != "url":
        return part
    try:
        return replace(part, source=_download(part.source))
    except OSError as error:
        raise _image_error(part, location=location, error=error) from error


def check_image_exists(part: ImagePart, *, location: str) -> None:
    """Raise UserError if a local file is missing, is not a usable image, or is a PNG or JPEG that was cut short.

    Other sources are not checked, and only a file without the usual ending is decoded.
    """
    if isinstance(part.source, str) and kind_of(part.source) == "path":
        image_size(part, location=location)


def image_size(part: ImagePart, *, location: str) -> tuple[int, int] | None:
    """Return width and height of the image that `load_image` would return; None for a URL, which is not fetched.

    An image is decoded only if its file lacks the usual ending. Raises what `load_image` does, as far as it is detected.
    """
    source = part.source.read() if isinstance(part.source, StoredBytes) else part.source
    if isinstance(source, str) and kind_of(source) == "url":
        return None
    try:
        if isinstance(source, Image.Image):
            _check_range(source)
            return _upright_size(source)
        with _opened(source) as file:
            return _checked_size(file)
    except _DECODE_ERRORS as error:
        raise _image_error(replace(part, source=source), location=location, error=error) from error


def _opened(source: str | bytes) -> IO[bytes]:
    if isinstance(source, str) and kind_of(source) == "path":
        return _path(source).open("rb")
    return io.BytesIO(_read(source))


def _checked_size(file: IO[bytes]) -> tuple[int, int]:
    file.seek(-min(_TAIL_BYTES, file.seek(0, io.SEEK_END)), io.SEEK_END)
    tail = file.read()
    file.seek(0)
    with open_image(file) as image:
        _check_range(image)
        if _ENDINGS.get(image.format or "", b"") not in tail:
            image.load()
        return _upright_size(image)


def _upright_size(image: Image.Image) -> tuple[int, int]:
    # Pillow turns a TIFF upright itself, and decodes a whole PNG to look for a tag that may be at its end.
    asks = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    turned = asks and image.getexif().get(ExifTags.Base.Orientation, 1) in _LYING
    return image.size[::-1] if turned else image.size


def _image_error(part: ImagePart, *, location: str, error: BaseException) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(
            f"{location}: no image file {describe(part.source)}; relative paths start at the row file's folder, "
            "or at --data.image_dir"
        )
    # strerror omits the path, which describe() already gives.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return UserError(
        f"{location}: cannot read the image {describe(part.source)}: {reason}; replace it or drop the row"
    )


def _path(source: str) -> Path:
    return Path(str(resolve(source, base_dir=Path.cwd())))


def _read(source: str | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    kind = kind_of(source)
    if kind == "url":
        return _download(source)
    return decode_base64(source) if kind == "base64" else _path(source).read_bytes()


def _is_transient(error: BaseException) -> bool:
    """Return whether a retry may help: connection errors and server errors, but not 404 and the like."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code == 429
    return isinstance(error, (OSError, http.client.HTTPException))


@tenacity.retry(
    retry=tenacity.retry_if_exception(_is_transient),
    stop=tenacity.stop_after_attempt(_DOWNLOAD_ATTEMPTS),
    wait=tenacity.wait_exponential(multiplier=0.5),
    reraise=True,
)
def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "lmm-r1"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as reply:
        return reply.read()


def _download(url: str) -> bytes:
    try:
        return _fetch(url)
    except http.client.HTTPException as error:
        raise OSError(f"the download broke off ({type(error).__name__}: {error})") from error


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey images in 8 bits, others unchanged; raises what `_check_range` does."""
    _check_range(image)
    if not image.mode.startswith("I"):
        return image
    # Pillow clips the values at 255, which turns most of the image white.
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")


def _check_range(image: Image.Image) -> None:
    """Raise ValueError for an image of integers or floats whose range is unknown."""
    # Pillow reads a PGM with more than 8 bits as integers from 0 to 65535.
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        raise ValueError(f"its pixels are {kind}, whose range is unknown; store it with 8 or 16 bits")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        # Dropping alpha would reveal the hidden colour, often black, under black ink.
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image)
        image = canvas
    return image.convert("RGB")


_SUFFIX = ".images"
_DIGITS = 16
_NAME = re.compile(rf"[0-9a-f]{{{_DIGITS}}}\.\w+")


@dataclass(frozen=True)
class PictureFolder:
    path: Path

    @classmethod
    def next_to(cls, output: Path) -> PictureFolder:
        """Return the folder of an output's pictures: `rows.images` for `rows.jsonl`."""
        return cls(output.with_name(output.stem + _SUFFIX))

    def kept(self, part: ImagePart) -> ImagePart:
        """Return a picture stored here, with its absolute path; files and URLs are returned unchanged.

        Raises:
            UserError: the picture cannot be written.
        """
        if kind_of(part.source) in ("path", "url"):
            return part
        data = encoded_image(part, location="a picture that was shown")
        with open_image(io.BytesIO(data)) as image:
            suffix = str(image.format).lower()
        path = self.path / f"{hashlib.sha256(data).hexdigest()[:_DIGITS]}.{suffix}"
        if not path.exists():
            write_bytes_atomically(path, data=data)
        return replace(part, source=os.path.abspath(path))

    def clear(self, *, but: Collection[str] = ()) -> None:
        """Delete the pictures of an earlier output, and nothing else.

        Args:
            but: paths of pictures to keep.
        """
        kept = {Path(path).name for path in but}
        if self.path.is_dir():
            for file in self.path.iterdir():
                if _NAME.fullmatch(file.name) and file.name not in kept:
                    file.unlink()
