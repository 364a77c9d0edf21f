"""Where rewards come from: reward servers over HTTP, a Python function, or a verifier by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.reward_source import named_verifier, reward_function
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.scoring.functions import FunctionScorer
from lmm_r1.scoring.row_client import RowClient
from lmm_r1.scoring.scored_response import ScoredResponse
from lmm_r1.scoring.verifier_scorer import VerifierScorer
from remote_rm.client import RewardClient
from remote_rm.verifier import Score


class _Source(Protocol):
    async def check_health(self) -> None: ...

    async def close(self) -> None: ...


class ResponseSource(_Source, Protocol):
    """Scores one response as soon as it is there; raises when no reward can be had, and never returns without one."""

    async def reward(
        self,
        *,
        query: str,
        prompt: str,
        label: str,
        response: str | None = None,
        further: Mapping[str, object] | None = None,
    ) -> Score: ...


@runtime_checkable
class RowSource(_Source, Protocol):
    """Scores one response, as a `ResponseSource` does, by all that is known of it."""

    async def reward_of(self, item: ScoredResponse) -> Score: ...


@runtime_checkable
class GroupSource(_Source, Protocol):
    """Scores all responses to a prompt at once, in their order."""

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]: ...


Scorer: TypeAlias = ResponseSource | RowSource | GroupSource


@runtime_checkable
class RowChecker(Protocol):
    """A source that not every row will do for."""

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that cannot be scored."""


def make_scorer(reward: RewardConfig, *, given: Callable[..., Any] | None = None) -> Scorer:
    """Return what `--reward.remote_url` names: a client of servers, a function, or a verifier.

    Args:
        given: the function itself, where it is in no Python file.
    """
    function = reward_function(reward)
    if function is not None:
        return FunctionScorer(function, given=given)
    if (verifier := named_verifier(reward)) is not None:
        return VerifierScorer(verifier)
    assert reward.remote_url is not None, "only a run with a reward service has a scorer"
    try:
        client = RewardClient(reward.remote_url.split(","), timeout_s=reward.timeout_s, deadline_s=reward.deadline_s)
    except ValueError as error:
        raise UserError(f"--reward.remote_url: {error}") from error
    return RowClient(client, fields=reward.request_fields) if reward.request_fields else client
