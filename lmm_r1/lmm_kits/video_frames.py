"""Videos in the layout, and with the times, that processors take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from lmm_r1.data.videos import Video


def channels_first(video: Video) -> np.ndarray:
    """Return frames (N, 3, H, W): the processors would take frames (N, H, W, 3) of height 1 or 3 for such ones."""
    import numpy as np

    return np.ascontiguousarray(video.frames.transpose(0, 3, 1, 2))


def video_metadata(video: Video) -> dict[str, Any]:
    """Return what the processors want to know: all frames are there, and they are to be taken as they are."""
    import numpy as np

    number = len(video.frames)
    return {
        "fps": video.fps,
        "total_num_frames": number,
        "duration": number / video.fps,
        # (an array, since a processor appends to a list)
        "frames_indices": np.arange(number),
    }
