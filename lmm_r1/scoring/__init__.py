"""Rewards of responses: verifiers in process and over HTTP, user functions, reward models and their service.

This module holds what all of them share: a response with its row, what gives it a reward, and weights of its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

from PIL import Image

from lmm_r1.config.rewards import FLAG, WeightedPart
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Row, TextPart, images_of
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from remote_rm.verifier import Score


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When in a run responses are scored: one value for all engines, sent by the driver with the prompts."""

    step: int
    """The step that trains on them, counted from 1; for held-out rows the number of steps that the model has had."""
    held_out: bool
    """Whether the row is from `--eval.dataset`, and its responses are not trained on."""


@dataclass(frozen=True, kw_only=True)
class ScoredResponse:
    """One response as it is given to a reward function."""

    row: Row
    prompt: str
    """The prompt as the model reads it, with special tokens."""
    query: str
    """Prompt and response as the model reads and writes them, with special tokens."""
    response: str
    """Without its end token."""
    num_tokens: int | None
    """Of the response, including the end token; None if unknown."""
    token_ids: tuple[int, ...] = ()
    """Of everything after the prompt."""
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of the prompt's images, as in its `EncodedPrompt`."""
    moment: Moment | None = None
    """None outside of a run."""


class Scorer(Protocol):
    """A source of rewards."""

    one_by_one: bool
    """Whether to score each response as soon as it is available, instead of all responses to a prompt together."""

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that cannot be scored."""

    async def check_health(self) -> None:
        """Start what is needed; raises UserError or RewardUnavailable if that fails."""

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the score of each response, in their order; raises an error instead of leaving out a reward."""

    async def close(self) -> None:
        """Release all resources."""


def made_up(row: Row, text: str, *, moment: Moment | None = None) -> ScoredResponse:
    """Return a response that no model has written, as a reward function gets it."""
    prompt = "\n".join(part.text for turn in row.messages for part in turn.parts if isinstance(part, TextPart))
    count = len(text.split()) + 1
    return ScoredResponse(
        row=row,
        prompt=prompt,
        query=prompt + text,
        response=text,
        num_tokens=count,
        token_ids=(0,) * count,
        image_scales=((1.0, 1.0),) * len(images_of(row.messages)),
        moment=moment,
    )


class RowImages(Sequence[Image.Image]):
    """The images of a row, each decoded when it is first accessed."""

    def __init__(self, row: Row) -> None:
        self._parts = images_of(row.messages)
        self._location = row.location
        self._decoded: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...

    @overload
    def __getitem__(self, index: slice) -> list[Image.Image]: ...

    def __getitem__(self, index: int | slice) -> Image.Image | list[Image.Image]:
        places = range(len(self._parts))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        if places not in self._decoded:
            self._decoded[places] = load_image(self._parts[places], location=self._location)
        return self._decoded[places]


def images_of_rows(rows: Sequence[Row]) -> list[RowImages]:
    """Return the images of each row; those of one row are decoded once."""
    by_row = {id(row): RowImages(row) for row in rows}
    return [by_row[id(row)] for row in rows]


def weighted(score: Score, weights: Sequence[WeightedPart], *, paid: Collection[str] = (), location: str) -> Score:
    """Return a score whose reward has the weighted parts added: r + sum of w_i x_i; its `score` and parts are unchanged.

    A part in `paid` is already in the reward, at weight 1; the given weight replaces that 1.

    Args:
        paid: the names of the parts that an environment has added to the reward.
        location: the location of the sample's row, for messages.

    Raises:
        UserError: there is no part of this name.
    """
    reward = score.reward
    for weight in weights:
        for factor in weight.factors:
            if factor not in score.parts:
                match = nearest(factor, known=score.parts)
                raise UserError(
                    f"{location}: {FLAG} names {factor}, but the parts of a response's reward are: "
                    f"{', '.join(sorted(score.parts)) or 'none'}; {f'did you mean {match}?' if match else 'name one of them'}"
                )
        reward += weight.earned(score.parts)
        if len(weight.factors) == 1 and weight.factors[0] in paid:
            reward -= score.parts[weight.factors[0]]
    return replace(score, reward=reward)
