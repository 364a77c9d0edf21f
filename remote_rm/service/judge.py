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
class ServiceLimits:
    """What the service accepts, and what one of its workers may use.

    The flags of `serving_arguments` have the same defaults.
    """

    max_queued_items: int = 10_000
    """With so many items waiting for a worker, a request that needs one is refused with 503."""
    max_request_bytes: int = 64 * 2**20
    """A larger body is refused with 413."""
    worker_memory_bytes: int = 2**30
    """Address space: an expression that outgrows it fails with a MemoryError instead of filling the machine."""

    def __post_init__(self) -> None:
        """Raise a ValueError unless every limit is at least 1."""
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


DEFAULT_LIMITS = ServiceLimits()


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

    async def judge(self, items: Sequence[Any]) -> list[Score]:
        """Return one score per item, in their order; raises PoolUnavailable or UnusableItem."""
