"""Images and videos as both training and rollouts give them to a Qwen-VL processor: their sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image
from transformers import ProcessorMixin

from lmm_r1.data.messages import ImagePart, VideoPart
from lmm_r1.data.videos import Video
from lmm_r1.lmm_kits.encoding import bounded_size

FRAMES_A_STEP = 2


def image_limits(processor: ProcessorMixin) -> tuple[int, int]:
    """Return the processor's own bounds on the pixels of an image."""
    size = processor.image_processor.size
    return size["shortest_edge"], size["longest_edge"]


def bounded_image(
    processor: ProcessorMixin, image: Image.Image, part: ImagePart, *, limits: tuple[int, int]
) -> Image.Image:
    """Resize an image to its part's pixel bounds, as far as the processor's own bounds leave room for them.

    Done before both the training and the rollout side see it, so that both cut it into the same patches.

    Args:
        limits: the fewest and the most pixels that the processor scales an image to.
    """
    if part.min_pixels is None and part.max_pixels is None:
        return image
    width, height = bounded_image_size(processor, part, width=image.width, height=image.height, limits=limits)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def bounded_image_size(
    processor: ProcessorMixin, part: ImagePart, *, width: int, height: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """Return the width and height to which `bounded_image` resizes an image of this size."""
    if part.min_pixels is None and part.max_pixels is None:
        return width, height
    image_processor = processor.image_processor
    lowest, highest = limits
    highest = min(highest, part.max_pixels or highest)
    rows, columns = bounded_size(
        height=height,
        width=width,
        factor=image_processor.patch_size * image_processor.merge_size,
        min_pixels=min(max(lowest, part.min_pixels or lowest), highest),
        max_pixels=highest,
    )
    return columns, rows


def bounded_video(
    processor: ProcessorMixin,
    video: Video,
    *,
    min_pixels: int | None,
    max_pixels: int | None,
    frames_together: int,
) -> Video:
    """Resize a video's frames to its own pixel bounds, as far as the processor's own bounds leave room for them.

    Args:
        frames_together: how many frames share the pixels that the processor's bounds speak of.
    """
    if min_pixels is None and max_pixels is None:
        return video
    video_processor = processor.video_processor
    lowest = -(-video_processor.size["shortest_edge"] // frames_together)
    highest = max(lowest, video_processor.size["longest_edge"] // frames_together)
    upper = min(max(lowest, max_pixels or highest), highest)
    height, width = bounded_size(
        height=video.frames.shape[1],
        width=video.frames.shape[2],
        factor=video_processor.patch_size * video_processor.merge_size,
        min_pixels=min(max(lowest, min_pixels or lowest), upper),
        max_pixels=upper,
    )
    frames = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)) for frame in video.frames
    ]
    return replace(video, frames=np.stack(frames))


def bounded_steps(processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
    """Return a video within its part's pixel bounds, for a processor that takes frames in pairs and bounds all together.

    It refuses a lone frame, which is shown twice.
    """
    if len(video.frames) < FRAMES_A_STEP:
        video = replace(video, frames=np.repeat(video.frames, FRAMES_A_STEP, axis=0))
    return bounded_video(
        processor,
        video,
        min_pixels=part.min_pixels,
        max_pixels=part.max_pixels,
        # As the processor rounds their number to whole steps.
        frames_together=round(len(video.frames) / FRAMES_A_STEP) * FRAMES_A_STEP,
    )
