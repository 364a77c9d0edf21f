"""A row encoded by a kit: its images and videos decoded, and what the kit refuses told with the row's place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.data.videos import load_video
from lmm_r1.errors import UserError

if TYPE_CHECKING:
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
