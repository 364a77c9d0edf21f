"""Images of rows, and videos as sampled frames: reading, decoding, checking, and writing them to files."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from PIL import ExifTags, Image

from lmm_r1.data.fetching import fetch
from lmm_r1.data.media_access import open_file
from lmm_r1.data.messages import (
    DECODE_ERRORS,
    ImagePart,
    StoredBytes,
    VideoPart,
    decode_base64,
    describe,
    kind_of,
    open_image,
    resolve,
)
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_bytes_atomically

if TYPE_CHECKING:
    import numpy as np


MOST_BYTES = 2**29
"""The largest image file that is read whole; others are decoded from their file."""
# What the last bytes of a complete file contain, by the format's name in Pillow.
_ENDINGS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9"}
_TAIL_BYTES = 16
# EXIF orientations that swap width and height.
_LYING = (5, 6, 7, 8)
# EXIF orientations from 2 on, each with what turns the picture upright.
_UPRIGHT = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_TURNS = {number: Image.Transpose[name] for number, name in enumerate(_UPRIGHT, start=2)}


def load_image(part: ImagePart, *, location: str, side: int | None = None) -> Image.Image:
    """Return the image in RGB, decoded and turned upright by its EXIF tag; transparent pixels become white.

    Args:
        side: what is shown of it, in pixels: a larger JPEG is decoded at a half, a quarter or an eighth of its size.

    Raises:
        UserError: the image is missing, cannot be fetched or cannot be decoded (names `location` and the image), or
            the row file that holds it has changed.
    """
    with _named(part, location=location):
        if isinstance(part.source, Image.Image):
            return _upright(part.source)
        with _opened(part.source) as file:
            image = open_image(file)
            if side is not None:
                image.draft("RGB", (side, side))
            return _upright(image)


def within_bounds(image: Image.Image, part: ImagePart) -> Image.Image:
    """Return the image resized to the pixel bounds of its part, for viewers that do not know them."""
    pixels = image.width * image.height
    wanted = pixels if part.min_pixels is None else max(pixels, part.min_pixels)
    wanted = wanted if part.max_pixels is None else min(wanted, part.max_pixels)
    if wanted == pixels:
        return image
    scale = math.sqrt(wanted / pixels)
    rounded = math.floor if wanted < pixels else math.ceil
    return image.resize(
        (max(1, rounded(image.width * scale)), max(1, rounded(image.height * scale))), Image.Resampling.BICUBIC
    )


def encoded_image(part: ImagePart, *, location: str) -> bytes:
    """Return the image as it is stored, in any format; an image held as pixels becomes a PNG.

    Raises:
        UserError: the image is missing or cannot be fetched (names `location` and the image), or the row file that
            holds it has changed.
    """
    with _named(part, location=location):
        if not isinstance(part.source, Image.Image):
            return _read(part.source)
        buffer = io.BytesIO()
        part.source.save(buffer, "PNG")
        return buffer.getvalue()


def fetched(part: ImagePart, *, location: str) -> ImagePart:
    """Return the part with the encoded bytes instead of a URL; any other part is returned unchanged.

    Raises:
        UserError: the image cannot be fetched; names `location` and the image.
    """
    is_url = isinstance(part.source, str) and kind_of(part.source) == "url"
    return replace(part, source=encoded_image(part, location=location)) if is_url else part


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
    if isinstance(part.source, str) and kind_of(part.source) == "url":
        return None
    with _named(part, location=location):
        if isinstance(part.source, Image.Image):
            _check_range(part.source)
            return _upright_size(part.source)
        with _opened(part.source) as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, io.SEEK_END)), io.SEEK_END)
            tail = file.read()
            file.seek(0)
            with open_image(file) as image:
                _check_range(image)
                if _ENDINGS.get(image.format or "", b"") not in tail:
                    image.load()
                return _upright_size(image)


@contextmanager
def _named(part: ImagePart, *, location: str) -> Iterator[None]:
    """Raise UserError, with the location and the image, for what fails in reading it."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"{location}: no image file {describe(part.source)}; relative paths start at the row file's folder, "
            "or at the folder of the flag image_dir"
        ) from error
    except DECODE_ERRORS as error:
        # strerror omits the path, which describe() already gives.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{location}: cannot read the image {describe(part.source)}: {reason}; replace it or drop the row"
        ) from error


def _opened(source: str | bytes | StoredBytes) -> IO[bytes]:
    is_path = isinstance(source, str) and kind_of(source) == "path"
    return open_file(_path(str(source))) if is_path else io.BytesIO(_read(source))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    # Pillow turns a TIFF upright itself, and decodes a whole PNG to look for a tag that may be at its end.
    asks = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    return image.size[::-1] if asks and _orientation(image) in _LYING else image.size


def _orientation(image: Image.Image) -> Any:
    """Return how the stored picture is turned, by its EXIF or XMP; 1, upright, if neither can be read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except DECODE_ERRORS:
        return 1


def _path(source: str) -> Path:
    return Path(str(resolve(source, base_dir=Path.cwd())))


def _read(source: str | bytes | StoredBytes) -> bytes:
    if isinstance(source, StoredBytes):
        return source.read()
    if isinstance(source, bytes):
        return source
    kind = kind_of(source)
    if kind == "url":
        return fetch(source)
    if kind == "base64":
        return decode_base64(source)
    with open_file(_path(source)) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(f"the file is larger than {MOST_BYTES // 2**20} MiB")
    return content


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    turn = None if image.format == "TIFF" else _TURNS.get(_orientation(image))
    image = _in_eight_bits(image)
    # A copy in any case, so that no caller changes an image that the row holds, and without metadata to turn it again by.
    upright = _to_rgb(image if turn is None else image.transpose(turn))
    upright.info = {}
    return upright


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey images in 8 bits, others unchanged; raises what `_check_range` does."""
    _check_range(image)
    if not image.mode.startswith("I"):
        return image
    import numpy as np

    # Pillow clips the values at 255, which turns most of the image white.
    small = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    small.info = image.info
    return small


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


DEFAULT_FPS = 2.0
"""Frames taken per second of a video, or shown per second by a list of frames, if the row does not say."""
DEFAULT_MAX_FRAMES = 32
"""The most frames that are taken from a video if the row does not say; longer videos are sampled more sparsely."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """Frames sampled from a video."""

    frames: np.ndarray
    """(N, H, W, 3), uint8, RGB, N >= 1."""
    fps: float
    """How many of these frames cover one second."""


def load_video(part: VideoPart, *, location: str) -> Video:
    """Return the part's frames in RGB, at most `max_frames` of them, evenly spaced.

    Raises:
        UserError: the video is missing, empty or cannot be decoded; names `location` and the video.
    """
    if isinstance(part.source, str):
        return _load_file(part.source, part, location=location)
    return _load_frames(part, location=location)


def check_video_exists(part: VideoPart, *, location: str) -> None:
    """Raise UserError if a video file is missing or empty, or a frame of a list is not an image; decodes no video."""
    if not isinstance(part.source, str):
        for frame in part.source:
            check_image_exists(ImagePart(frame), location=location)
        return
    path = Path(part.source)
    if not path.is_file():
        raise UserError(f"{location}: no video file {path}; relative paths start at the row file's folder")
    if path.stat().st_size == 0:
        raise UserError(f"{location}: the video file {path} is empty; replace it or drop the row")


def video_size(part: VideoPart, *, location: str) -> tuple[int, int] | None:
    """Return the width and height of a video's frames without decoding any; None if the first frame is a URL.

    Raises what `load_video` does, as far as opening the file or its first frame detects it.
    """
    if not isinstance(part.source, str):
        return image_size(ImagePart(part.source[0]), location=location)
    check_video_exists(part, location=location)
    return _VideoFile(part.source, location=location).size


def frame_indices(*, total: int, seconds: float, fps: float, max_frames: int) -> list[int]:
    """Return which of `total` frames to take for `fps` frames per second, at least 1 and at most `max_frames`.

    The first frame of each of equal spans is taken: 90 frames in 3 s at 2 fps give 0, 15, ..., 75.
    """
    count = max(1, min(math.floor(seconds * fps + 0.5), max_frames, total))
    return [index * total // count for index in range(count)]


def _load_frames(part: VideoPart, *, location: str) -> Video:
    import numpy as np

    sources, fps = part.source, part.fps or DEFAULT_FPS
    chosen = frame_indices(
        total=len(sources), seconds=len(sources) / fps, fps=fps, max_frames=part.max_frames or DEFAULT_MAX_FRAMES
    )
    images = [load_image(ImagePart(sources[index]), location=location) for index in chosen]
    for index, image in zip(chosen, images, strict=True):
        if image.size != images[0].size:
            raise UserError(
                f"{location}: the frames of a video differ in size: {describe(sources[index])} has {image.width}x"
                f"{image.height} pixels, the first has {images[0].width}x{images[0].height}; give frames of one size"
            )
    return Video(frames=np.stack([np.asarray(image) for image in images]), fps=fps * len(chosen) / len(sources))


def _load_file(path: str, part: VideoPart, *, location: str) -> Video:
    import numpy as np

    check_video_exists(part, location=location)
    video = _VideoFile(path, location=location)
    # Some containers state more frames than they contain.
    for stated in (video.stated_frames, 0):
        total = stated or video.count_frames()
        indices = frame_indices(
            total=total,
            seconds=total / video.fps,
            fps=part.fps or DEFAULT_FPS,
            max_frames=part.max_frames or DEFAULT_MAX_FRAMES,
        )
        frames = video.read(indices)
        if len(frames) == len(indices):
            return Video(frames=np.stack(list(frames.values())), fps=len(indices) * video.fps / total)
    lost = next(index for index in indices if index not in frames)
    raise video.error(f"frame {lost} of {total} cannot be decoded")


class _VideoFile:
    def __init__(self, path: str, *, location: str) -> None:
        try:
            import cv2
        except ImportError as error:
            raise UserError(
                f"{location}: reading a video file needs OpenCV; install it (pip install opencv-python-headless), "
                "or give the video as a list of frame images"
            ) from error
        self.path = path
        self.location = location
        with self._opened() as capture:
            self.fps: float = capture.get(cv2.CAP_PROP_FPS)
            self.stated_frames = max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))
            self.size = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
            if not capture.isOpened() or not math.isfinite(self.fps) or self.fps <= 0:
                raise self.error("OpenCV finds no video in it")

    def error(self, reason: str) -> UserError:
        return UserError(f"{self.location}: cannot read the video {self.path}: {reason}; replace it or drop the row")

    def count_frames(self) -> int:
        """Return how many frames the file holds, by reading all of them; raises UserError if there are none."""
        with self._opened() as capture:
            count = 0
            while capture.grab():
                count += 1
        if count == 0:
            raise self.error("it holds no frame")
        return count

    def read(self, indices: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the frames that can be decoded, by index: (H, W, 3), uint8, RGB."""
        frames: dict[int, np.ndarray] = {}
        with self._opened() as capture:
            # Read in the order of the file: few formats can seek to an exact frame.
            for index in range(indices[-1] + 1):
                if not capture.grab():
                    break
                if index in indices:
                    intact, frame = capture.retrieve()
                    if intact:
                        frames[index] = frame[:, :, ::-1].copy()
        return frames

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import cv2

        capture = cv2.VideoCapture(self.path)
        try:
            yield capture
        finally:
            capture.release()
