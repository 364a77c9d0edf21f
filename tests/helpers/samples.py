"""Samples and episodes as an engine gives them, of tokens and turns that are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from helpers.conversations import message, row

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import EpisodeResult, MediaRef, Said, Sample, Segment
from remote_rm.verifier import Score

QUESTION = row(message("user", "?"), answer="2")


def media_ref(key: str, *, nbytes: int = 0) -> MediaRef:
    """What stands for media in the driver, of an object that no store holds."""
    return MediaRef(key=key, stored=None, nbytes=nbytes)


def generated_sample(
    prompt: Sequence[int] = (5, 6, 7),
    response: Sequence[int] = (8, 9),
    *,
    of: Row = QUESTION,
    media: MediaRef | None = None,
    log_probs: Sequence[float] | None = None,
    text: str = "",
    reward: float = 0.0,
    score: float | None = None,
    parts: dict[str, float] | None = None,
) -> Sample:
    """One response behind its prompt.

    Args:
        score: the reward where it is left out.
    """
    known = None if log_probs is None else tuple(log_probs)
    return Sample(
        row=of,
        segments=(
            Segment(kind="prompt", token_ids=tuple(prompt), media=media),
            Segment(kind="generated", token_ids=tuple(response), log_probs=known),
        ),
        response=text,
        finish_reason="stop",
        weight_version=0,
        reward=Score(reward=reward, score=reward if score is None else score, parts=parts or {}),
    )


def of_answer(item: Row, *, score: float) -> Sample:
    """A sample of a row whose reward is twice its score."""
    return generated_sample(of=item, reward=2 * score, score=score, parts={"accuracy": score})


def unrewarded(sample: Sample) -> Sample:
    """The sample as it is before a reward model gives its reward."""
    return replace(sample, reward=None)


def episode(
    *said: Said, of: Row = QUESTION, reward: float = 0.0, parts: dict[str, float] | None = None, **played: Any
) -> Sample:
    """An episode of these turns; all else as the defaults of `EpisodeResult`."""
    known = {"end": "over", "images": sum(len(one.images) for one in said), "rewards": {}, "counts": {}} | played
    sample = generated_sample(of=of, text=said[-1].text, reward=reward, parts=parts)
    return replace(sample, played=EpisodeResult(said=said, **known))
