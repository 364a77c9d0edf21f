"""Samples of episodes as an engine gives them, of turns that are written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.samples import QUESTION, generated_sample

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import EpisodeResult, Said, Sample


def episode(
    *said: Said, of: Row = QUESTION, reward: float = 0.0, parts: dict[str, float] | None = None, **played: Any
) -> Sample:
    """An episode of these turns; all else as the defaults of `EpisodeResult`."""
    known = {"end": "over", "images": sum(len(one.images) for one in said), "rewards": {}, "counts": {}} | played
    sample = generated_sample(of=of, text=said[-1].text, reward=reward, parts=parts)
    return replace(sample, played=EpisodeResult(said=said, **known))
