"""What a verifier is: the item it judges, the score it gives, and the four methods the service calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from remote_rm.service.judge import PooledJudge, ServiceLimits
    from remote_rm.service.pool import VerifierPool


@dataclass(frozen=True, kw_only=True)
class Item:
    """One sample to judge."""

    prompt: str
    response: str
    label: str
    image_scales: Sequence[Sequence[float]] = ()
    """Of each image, (x, y): what coordinates that the model writes are multiplied by to be pixels of the image as it is
    stored. Empty where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a response is worth, whoever says so: a verifier, a reward server, a user's function, a reward model."""

    reward: float
    """What the policy is trained on."""
    score: float
    """By a verifier, right (1.0) or wrong (0.0), or how right, between the two, by one that measures; the reward itself
    where nothing else is known."""
    parts: dict[str, float]
    """Named numbers for the log. Of a verifier, the unweighted verdicts that the reward is formed from, the same names in
    each of its scores: {"accuracy": 1.0, "format": 0.0}. Of a server or a function, all of its `extra_logs`."""
    timed_out: bool = False
    """The response was not judged within the time limit, and counts as wrong."""

    @classmethod
    def of_reply(cls, *, reward: float, score: float, extra_logs: dict[str, float]) -> Score:
        """Return what a reward server or a user's function says of one response."""
        return cls(reward=reward, score=score, parts=extra_logs, timed_out=extra_logs.get("timed_out", 0.0) > 0)


def extra_logs_of(scores: Sequence[Score]) -> dict[str, list[float]]:
    """Return the parts of one verifier's scores as a reply lists them, with `timed_out` (0.0 or 1.0) beside them."""
    names = scores[0].parts if scores else ()
    logs = {name: [score.parts[name] for score in scores] for name in names}
    return {**logs, "timed_out": [float(score.timed_out) for score in scores]}


class Verifier(Protocol):
    """Judges items; it is pickled into the worker processes, so it holds plain values only."""

    @property
    def name(self) -> str:
        """What it is registered as."""

    def check_label(self, label: str) -> None:
        """Raise a ValueError that says what is wrong with a label that no response could be judged by."""

    def quick_score(self, item: Item) -> Score | None:
        """The score, if a bounded number of microseconds is enough to tell; runs in the server process."""

    def score(self, item: Item) -> Score:
        """The score, whatever it takes; runs in a worker process that is killed when it takes too long."""

    def failed_score(self, item: Item) -> Score:
        """The score of an item whose `score` was killed or raised; must be quick and must not raise."""


@runtime_checkable
class AskingVerifier(Verifier, Protocol):
    """A verifier that waits for others over a network: no worker process and no `score` may wait so long.

    Its `quick_score` and `score` are a rule's, and what asks stands around the pool that judges by them.
    """

    def judge_around(self, rules: VerifierPool, *, limits: ServiceLimits) -> PooledJudge:
        """Return the judge that asks, in the event loop, where the pool's verdict is not the last word."""

    async def check_ready(self) -> None:
        """Raise NotReady where nobody could be asked, before anything is started."""
