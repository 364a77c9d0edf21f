"""The text of a video in SmolVLM2: how many frames it has and how long it is, and each frame behind its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import SmolVLMProcessor
from transformers.video_utils import VideoMetadata

from lmm_r1.lmm_kits.idefics import AROUND_IMAGE

VIDEO = "<video>"
"""What the chat template writes for a video."""


def video_text(processor: SmolVLMProcessor, metadata: Mapping[str, Any]) -> str:
    """Return what the processor writes for a video of which all frames are shown."""
    frames = torch.empty(1, metadata["total_num_frames"], 0)
    return processor.replace_video_token({"pixel_values": frames, "video_metadata": [VideoMetadata(**metadata)]}, 0)


def around_frames(text: str) -> tuple[str, str]:
    """Return what stands before the first frame of such a text, and behind its last one."""
    return text[: text.index(AROUND_IMAGE)], text[text.rindex(AROUND_IMAGE) + len(AROUND_IMAGE) :]
