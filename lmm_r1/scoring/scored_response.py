"""One response as whoever scores it is given it: with its row, the row's images, and when in the run it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Row, images_of


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When in a run responses are scored: one value for all engines, which the driver gives with the prompts."""

    step: int
    """The step that learns from them, counted from 1; of held-out rows the steps that the model has had."""
    held_out: bool
    """The row is one of `--eval.dataset`, and nothing learns from its responses."""


@dataclass(frozen=True, kw_only=True)
class ScoredResponse:
    """One response as a reward function is given it."""

    row: Row
    prompt: str
    """The prompt as the model reads it, special tokens included."""
    query: str
    """Prompt and response as the model reads and writes them, special tokens included."""
    response: str
    """The response's text, without its end token."""
    num_tokens: int
    """Of the response; the end token counts."""
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of the prompt's images, as its `EncodedPrompt` has them."""
    moment: Moment | None = None
    """None outside of a run."""


class RowImages(Sequence[Image.Image]):
    """The images of a row, each decoded when it is first looked at."""

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
