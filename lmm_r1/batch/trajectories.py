"""Episodes in the lines of a job: the whole conversation as messages, and what it has earned."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmm_r1.data.image_sources import kind_of
from lmm_r1.data.messages import Message, Part, TextPart
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.data.sample import Played, Said
from lmm_r1.errors import UserError
from remote_rm.verifier import Score

MESSAGES = "messages"
"""Of a response that is an episode: its conversation."""
END = "end"
_MARK = "<image>"


def episode_fields(played: Played, *, folder: Path, location: str) -> dict[str, Any]:
    """Return what a line says of an episode beside its last turn.

    Raises UserError where the places of its pictures are not known.

    Args:
        folder: of the line's file; pictures in it have a path from there.
        location: of the row, for messages.
    """
    messages = [*played.shown, *(_message(said, location=location) for said in played.said)]
    within = os.path.abspath(folder)

    def path_from_there(path: str) -> str:
        return os.path.relpath(path, within) if Path(path).is_relative_to(within) else path

    return {
        END: played.end,
        "turns": played.turns,
        "shown_images": played.images,
        "counts": dict(played.counts),
        MESSAGES: with_paths(stored_messages(messages), path_from_there),
    }


def with_earned(score: Score | None, played: Played) -> Score | None:
    """Return the score of an episode's last turn with what its environment has given; None where neither gives any."""
    if not played.rewards:
        return score
    earned = sum(played.rewards.values())
    if score is None:
        return Score(reward=earned, score=earned, parts=dict(played.rewards))
    return replace(score, reward=score.reward + earned, parts={**score.parts, **played.rewards})


def with_paths(messages: Sequence[Mapping[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return stored messages with the path of each image file changed; other images stay."""

    def changed(part: Mapping[str, Any]) -> dict[str, Any]:
        image = part.get("image")
        if not isinstance(image, str) or kind_of(image) != "path":
            return dict(part)
        return {**part, "image": change(image)}

    return [
        {**one, "content": list(map(changed, one["content"]))} if isinstance(one["content"], list) else dict(one)
        for one in messages
    ]


def _message(said: Said, *, location: str) -> Message:
    if said.role == "assistant":
        return Message(role=said.role, parts=(TextPart(said.text),))
    texts = said.text.split(_MARK)
    if len(texts) != len(said.images) + 1:
        raise UserError(
            f"{location}: the environment shows the word {_MARK} as text, so that the places of its pictures are not "
            "known; let it write another word"
        )
    parts: list[Part] = [TextPart(texts[0])]
    for image, text in zip(said.images, texts[1:], strict=True):
        parts += [image, TextPart(text)]
    return Message(role=said.role, parts=tuple(part for part in parts if part != TextPart("")))
