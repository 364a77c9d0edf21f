"""A curriculum by difficulty as the run itself has measured it: how often each prompt was solved when it came last."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np

CurriculumName = Literal["easy_first", "uncertain"]
UNKNOWN = 0.5
"""How often a prompt is taken to be solved that nobody has answered yet."""
LEAST_SHARE = 0.1
"""Of the weight of a prompt that is solved half of the time, what one has that is always or never solved."""


class MeasuredCurriculum:
    """Orders the prompts of an episode by the solve rates of those before."""

    def __init__(self, kind: CurriculumName, *, rows: int) -> None:
        self.kind = kind
        self.solved = np.full(rows, np.nan)
        """The mean score of each prompt's last group, 0 to 1 where scores are, (N,); NaN where there was none."""

    @property
    def mean(self) -> float | None:
        """The mean of `solved` over the prompts that were answered; None before the first."""
        known = self.solved[~np.isnan(self.solved)]
        return float(known.mean()) if len(known) else None

    def note(self, places: Sequence[int], solved: Sequence[float | None]) -> None:
        """Note how often prompts were solved; None leaves what is known."""
        for place, rate in zip(places, solved, strict=True):
            if rate is not None:
                self.solved[place] = rate

    def load(self, solved: Sequence[float]) -> None:
        """Go on from `solved` of a stopped run."""
        assert len(solved) == len(self.solved), "the run's rows are those of its checkpoints"
        self.solved = np.array(solved)

    def ordered(self, shuffled: Sequence[int], draw: random.Random) -> list[int]:
        """Return the places of the prompts of an episode, N, from a shuffled order of all of them.

        Before anything is measured it is that order. `easy_first` sorts it from often to seldom solved, `uncertain` draws
        from it by `weights`, so that an episode has a prompt several times, once or not at all.
        """
        if np.isnan(self.solved).all():
            return list(shuffled)
        rates = np.where(np.isnan(self.solved), UNKNOWN, self.solved)
        if self.kind == "easy_first":
            return sorted(shuffled, key=lambda place: -rates[place])
        drawn = systematic(weights(rates[np.array(shuffled)]), start=draw.random())
        order = [shuffled[place] for place in drawn]
        draw.shuffle(order)
        return order


def weights(rates: np.ndarray) -> np.ndarray:
    """Return how much prompts count that are solved so often, (N,): 4 p (1 - p), the variance of a right answer against the
    largest there is, and `LEAST_SHARE` at least, so that all of them are measured again."""
    inside = np.clip(rates, 0.0, 1.0)
    return np.maximum(4 * inside * (1 - inside), LEAST_SHARE)


def systematic(weighted: np.ndarray, *, start: float) -> list[int]:
    """Return N places drawn in proportion to N weights, each the expected number of times rounded down or up.

    Args:
        start: where the first draw is in its N-th, 0 to 1.
    """
    count = len(weighted)
    bounds = np.cumsum(weighted) * count / weighted.sum()
    places = np.searchsorted(bounds, np.arange(count) + start, side="right")
    return np.minimum(places, count - 1).tolist()
