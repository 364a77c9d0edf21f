"""Dataset rows and a kit: whether it takes their media, and a row encoded; what it refuses is told with the row's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.data.videos import load_video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit


def encode_row(row: Row, *, kit: LmmKit, processor: Any, add_generation_prompt: bool) -> EncodedPrompt:
    """Return the row's encoded messages; raises UserError, with the row's place, for media that cannot be taken."""
    images = [load_image(part, location=row.location) for part in images_of(row.messages)]
    videos = [load_video(part, location=row.location) for part in videos_of(row.messages)]
    try:
        return kit.encode(
            processor, row.messages, images=images, videos=videos, add_generation_prompt=add_generation_prompt
        )
    except UserError as error:
        raise UserError(f"{row.location}: {error}") from error


def check_images_taken(rows: Sequence[Row], *, kit: LmmKit, model: str) -> None:
    """Raise UserError at the first row with an image or a video that the kit's models cannot take."""
    for row in rows:
        if images_of(row.messages) and not kit.takes_images:
            raise UserError(
                f"{row.location}: the row has an image, but {model} is a plain language model; "
                "give a multimodal model or leave such rows out"
            )
        if videos_of(row.messages) and not kit.takes_videos:
            raise UserError(
                f"{row.location}: the row has a video, but {model} takes none; "
                "give a model that does (lmm-r1 kits lists them), or leave such rows out"
            )
