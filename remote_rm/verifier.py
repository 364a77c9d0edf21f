"""What a verifier is: the item it judges, the score it gives, and the four methods the service calls."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Item:
    """One sample to judge."""

    prompt: str
    response: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward and the named parts it was formed from."""

    reward: float
    score: float
    """Right (1.0) or wrong (0.0)."""
    parts: dict[str, float]
    """Unweighted, e.g. {"accuracy": 1.0, "format": 0.0}; every score of one verifier names the same parts."""


class Verifier(Protocol):
    """Judges items; it is pickled into the worker processes, so it holds plain values only."""

    name: str

    def check_label(self, label: str) -> None:
        """Raise a ValueError that says what is wrong with a label that no response could be judged by."""

    def quick_score(self, item: Item) -> Score | None:
        """The score, if a bounded number of microseconds is enough to tell; runs in the server process."""

    def score(self, item: Item) -> Score:
        """The score, whatever it takes; runs in a worker process that is killed when it takes too long."""

    def failed_score(self, item: Item) -> Score:
        """The score of an item whose `score` was killed or raised; must be quick and must not raise."""
