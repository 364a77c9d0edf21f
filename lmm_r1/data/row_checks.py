"""Whether rows suit the model and the stage, asked of all of them before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from lmm_r1.lmm_kits import LmmKit


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


def learnt_turns(row: Row, *, every_turn: bool) -> list[int]:
    """Return the indices of the assistant turns to learn, all or the last; raises UserError where there is none."""
    turns = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    turns = turns if every_turn else turns[-1:]
    if not turns or turns[0] == 0:
        raise UserError(f"{row.location}: an assistant turn must follow a prompt; SFT rows end with one")
    return turns
