"""Videos as sampled frames, identical in training and in rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.image_sources import describe
from lmm_r1.data.images import check_image_exists, image_size, load_image
from lmm_r1.data.messages import ImagePart, VideoPart
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import numpy as np

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
    wanted = partial(frame_indices, fps=part.fps or DEFAULT_FPS, max_frames=part.max_frames or DEFAULT_MAX_FRAMES)
    total = video.stated_frames or video.count_frames()
    indices = wanted(total=total, seconds=total / video.fps)
    frames = video.read(indices)
    if len(frames) < len(indices):
        # Some containers state more frames than they contain.
        total = video.count_frames()
        indices = wanted(total=total, seconds=total / video.fps)
        frames = video.read(indices)
    if len(frames) < len(indices):
        lost = next(index for index in indices if index not in frames)
        raise video.error(f"frame {lost} of {total} cannot be decoded")
    return Video(frames=np.stack([frames[index] for index in indices]), fps=len(indices) * video.fps / total)


class _VideoFile:
    """One video file, read with OpenCV."""

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
