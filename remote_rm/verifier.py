"""Verifiers and judges: the item that is judged, its score, and the methods and limits of both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from remote_rm.service.pool import VerifierPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One sample to judge."""

    prompt: str
    response: str
    label: str
    image_scales: Sequence[Sequence[float]] = ()
    """For each image, the factors (x, y) that turn coordinates which the model writes into pixels of the stored image.
    Empty if they are not known."""

    @property
    def excerpt(self) -> str:
        """The item in a line of a log."""
        return f"label {self.label[:100]!r}, response ending in {self.response[-200:]!r}"


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a response, from a verifier, a reward server, a user's function or a reward model."""

    reward: float
    """What the policy is trained on."""
    score: float
    """By a verifier, right (1.0) or wrong (0.0), or how right, between the two, by one that measures; the reward itself
    if nothing else is known."""
    parts: dict[str, float]
    """Named numbers for the log. Of a verifier, the unweighted verdicts that the reward is formed from, the same names in
    each of its scores: {"accuracy": 1.0, "format": 0.0}. Of a server or a function, all of its `extra_logs`."""
    timed_out: bool = False
    """The response was not judged within the time limit, and counts as wrong."""

    @classmethod
    def of_reply(cls, *, reward: float, score: float, extra_logs: dict[str, float]) -> Score:
        """Return the score that a reward server or a user's function gives one response."""
        return cls(reward=reward, score=score, parts=extra_logs, timed_out=extra_logs.get("timed_out", 0.0) > 0)


def extra_logs_of(scores: Sequence[Score]) -> dict[str, list[float]]:
    """Return the parts of one verifier's scores as a reply lists them, with `timed_out` (0.0 or 1.0)."""
    names = scores[0].parts if scores else ()
    logs = {name: [score.parts[name] for score in scores] for name in names}
    return {**logs, "timed_out": [float(score.timed_out) for score in scores]}


class Verifier(Protocol):
    """Judges items; it is pickled into the worker processes, so it holds plain values only."""

    @property
    def name(self) -> str:
        """What it is registered as."""

    def check_label(self, label: str) -> None:
        """Raise a ValueError that says what is wrong with an unusable label."""

    def quick_score(self, item: Item) -> Score | None:
        """The score, if a bounded number of microseconds suffices; runs in the server process."""

    def score(self, item: Item) -> Score:
        """The score, whatever it takes; runs in a worker process that is killed when it takes too long."""

    def failed_score(self, item: Item) -> Score:
        """The score of an item whose `score` was killed or raised; must be quick and must not raise."""


def quick_score(verifier: Verifier, item: Item) -> Score | None:
    """Return the verifier's quick score; None if it has none or raises."""
    try:
        return verifier.quick_score(item)
    except Exception:
        # The text comes from a model: whatever a rule makes of it, a worker tries again.
        logger.exception("quick_score raised for %s", item.excerpt)
        return None


def as_text(value: Any) -> Any:
    """Return a number or a truth value as text, `7` for 7.0; other values as they are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
    return str(value) if is_number else value


def check_parallel(subject: str, columns: Mapping[str, Sequence[object] | None]) -> None:
    """Raise a ValueError unless all lists are equally long; None is no list."""
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"{subject} must be equally long, but {listed}")


def check_labels(items: Sequence[Item], *, verifier: Verifier) -> None:
    """Raise an UnusableItem that names the place of a label which the verifier refuses."""
    for index, item in enumerate(items):
        try:
            verifier.check_label(item.label)
        except ValueError as error:
            raise UnusableItem(f"labels[{index}]: {error}") from error


@runtime_checkable
class AskingVerifier(Verifier, Protocol):
    """A verifier that waits for others over a network: no worker process and no `score` may wait so long.

    Its `quick_score` and `score` are a rule's; the judge that asks is a pool of the rule's workers, too.
    """

    def judge_type(self) -> type[VerifierPool]:
        """Return the pool that asks, in the event loop, if the rule's verdict is not final."""

    async def check_ready(self) -> None:
        """Raise NotReady if the judge cannot be asked, before anything is started."""


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
    """What one request may hold; the server's flags have the same defaults."""

    max_request_items: int = 10_000
    """A request with more is refused with 413."""
    max_request_bytes: int = 64 * 2**20
    """A larger body is refused with 413."""


DEFAULT_LIMITS = ServiceLimits()
WORKER_MEMORY_BYTES = 2**30
"""Address space of a worker: an expression that outgrows it fails with a MemoryError instead of filling the machine."""


class PoolUnavailable(RuntimeError):
    """No item can be judged now; another server, or this one later, may do it."""


class NotReady(RuntimeError):
    """A judge cannot start, for a reason that the user can fix; the message says what to do."""


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
        """How many items wait or are being judged."""

    async def start(self) -> None:
        """Get ready for items; raises a RuntimeError if that fails."""

    async def stop(self) -> None:
        """Drop items in progress and free all resources."""

    async def judge(self, items: Sequence[Any]) -> list[Score]:
        """Return one score per item, in their order; raises PoolUnavailable or UnusableItem.

        Cancelled, it frees what the items hold: those that wait, and the workers of those that are being judged.
        """
