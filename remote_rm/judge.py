"""What stands behind the HTTP application: something that judges items, says how busy it is, and can be full."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from remote_rm.verifier import Score


@dataclass(kw_only=True)
class JudgeCounts:
    """What has been judged since the start."""

    items: int = 0
    quick: int = 0
    """Decided in the server process."""
    worker: int = 0
    """Decided by a worker."""
    timed_out: int = 0
    failed: int = 0
    """Items whose verifier raised, or whose worker died of them, or that a model could not score."""
    lost_workers: int = 0
    """Workers killed from outside; their items were judged again."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The score of one item, and whether it was cut off."""

    score: Score
    timed_out: bool = False


class PoolUnavailable(RuntimeError):
    """No more items can be taken on now."""

    def __init__(self, reason: str, *, retry_after_seconds: int) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class UnusableItem(ValueError):
    """An item that cannot be judged, by the fault of whoever sent it; the message names its place in the request."""


class Judge(Protocol):
    """Judges the items of requests, which are dataclasses of whatever kind it takes.

    Belongs to the event loop that `start` ran in.
    """

    counts: JudgeCounts

    @property
    def name(self) -> str:
        """What `GET /health` calls it."""

    @property
    def waiting(self) -> int:
        """How many items wait."""

    @property
    def busy(self) -> int:
        """How many items are being judged."""

    @property
    def workers(self) -> int:
        """How many items, or batches of them, can be judged at a time."""

    def most_seconds_left(self) -> float:
        """The longest that the items at hand can take."""

    async def start(self) -> None:
        """Be ready for items; raises a RuntimeError where that fails."""

    async def stop(self) -> None:
        """Drop what is at hand and free what was taken."""

    async def judge(self, items: Sequence[Any]) -> list[Judgement]:
        """Return one judgement per item, in their order; raises PoolUnavailable or UnusableItem."""
