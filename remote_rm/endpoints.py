"""Which of several reward servers to ask next: in turn while they are well, and one request at a time after a failure."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 0.2
"""The pause after a first failure, doubled with each further one, with jitter."""
MAX_PAUSE_SECONDS = 5.0


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """One server, and how it has been doing."""

    address: str
    failures: int = 0
    """In a row; 0 while it is well."""
    failed_at: float = float("-inf")
    asked_again_at: float = 0.0
    last_failure: str = ""
    is_ours: bool | None = None
    """Whether it is a server of this package; None until somebody has asked it."""

    @property
    def is_well(self) -> bool:
        """Whether the last thing heard of it was a reply."""
        return self.failures == 0


class EndpointRota:
    """Hands out endpoints; told of each outcome, it keeps requests away from servers that fail.

    Times are those of `time.monotonic`.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.endpoints = tuple(Endpoint(address=address) for address in addresses)
        self._turn = 0

    def take(self) -> Endpoint | None:
        """Return the endpoint to ask now, or None while all of them rest.

        One that failed is handed out once per pause: whether it is back is found out by one request, not by all.
        """
        in_turn = [*self.endpoints[self._turn :], *self.endpoints[: self._turn]]
        now = time.monotonic()
        due = (endpoint for endpoint in in_turn if not endpoint.is_well and endpoint.asked_again_at <= now)
        well = (endpoint for endpoint in in_turn if endpoint.is_well)
        chosen = next(due, None) or next(well, None)
        if chosen is not None:
            self._turn = (self.endpoints.index(chosen) + 1) % len(self.endpoints)
            if not chosen.is_well:
                chosen.asked_again_at = now + _pause(chosen.failures)
        return chosen

    def seconds_to_wait(self) -> float:
        """How long until `take` has one to give, unless a reply comes first."""
        return max(0.0, min(endpoint.asked_again_at for endpoint in self.endpoints) - time.monotonic())

    def succeeded(self, endpoint: Endpoint) -> None:
        """Note a reply."""
        endpoint.failures = 0

    def failed(self, endpoint: Endpoint, *, asked_at: float, reason: str, retry_after_seconds: float = 0.0) -> None:
        """Note a failure; those of requests that were under way together count once.

        Args:
            asked_at: when the request was sent.
            retry_after_seconds: the least pause, as the server asked for.
        """
        now = time.monotonic()
        if asked_at >= endpoint.failed_at:
            endpoint.failures += 1
            endpoint.failed_at = now
            endpoint.asked_again_at = now + _pause(endpoint.failures)
        endpoint.last_failure = reason
        endpoint.asked_again_at = max(endpoint.asked_again_at, now + retry_after_seconds)


def _pause(failures: int) -> float:
    longest = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)
