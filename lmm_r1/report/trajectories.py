"""Episodes as the page's script reads them: their turns with pictures, why they ended, what is counted in them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lmm_r1.evaluation.page_images import ImageError
from lmm_r1.records.conversations import Part, Turn
from lmm_r1.records.rollouts import END_WORDS, Rollout
from lmm_r1.report.inline_images import InlineImages

NOTED = ("turns", "shown_images", "over_turn", "environment_failed")
"""What the rollout notes of every episode among the parts of its reward, beside what its environment counts."""
WHY_ENDED = {
    "over": "the policy gave its answer, or the environment ended the episode",
    "turns": "it would have gone on beyond the turns of --agent.max_turns",
    "images": "it would have been shown more pictures than --agent.max_images",
    "tokens": "it would have gone on beyond the tokens of --data.max_len",
    "failed": "it raised an error, showed what cannot be taken, or took longer than --agent.answer_s",
}
assert set(WHY_ENDED) == set(END_WORDS)


def episode_record(rollout: Rollout, *, images: InlineImages, folder: Path) -> dict[str, object]:
    """Return what the page is told of a rollout's episode; of a single response nothing of it is filled.

    Args:
        folder: the stage's, where its pictures lie.
    """
    noted = [name for name in NOTED if name in rollout.scores] if rollout.end is not None else []
    return {
        "said": [_turn(turn, images=images, folder=folder) for turn in rollout.said],
        "ended": END_WORDS.get(rollout.end, rollout.end) if rollout.end is not None else None,
        "why_ended": WHY_ENDED.get(rollout.end, "") if rollout.end is not None else "",
        # Those of `scores` that are no reward.
        "counted": [*rollout.counts, *noted],
    }


def shown_part(part: Part, *, images: InlineImages, folder: Path) -> dict[str, object]:
    """Return a part of a message as the page's script reads it: a text, an image, or why that is missing."""
    if part.kind == "text":
        return {"text": part.value}
    cut = {} if part.cut is None else {"cut": asdict(part.cut)}
    try:
        return {"image": images.add(part.value, folder=folder), **cut}
    except ImageError as error:
        shown = "data URI" if part.value.startswith("data:") else part.value
        return {"missing": f"{shown}: {error}", **cut}


def _turn(turn: Turn, *, images: InlineImages, folder: Path) -> dict[str, object]:
    return {
        "role": turn.role,
        "parts": [shown_part(part, images=images, folder=folder) for part in turn.parts],
        "calls": [asdict(call) for call in turn.calls],
        "rewards": turn.rewards,
    }
