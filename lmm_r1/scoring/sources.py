"""The sources of rewards: reward servers over HTTP, Python functions, verifiers by their names, and sums of them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from lmm_r1.config.ppo import RequestField, RewardConfig
from lmm_r1.config.rewards import (
    GivenFunctions,
    ListedReward,
    RewardFunction,
    is_function,
    named_verifier,
    reward_functions,
    reward_list,
    reward_sources,
    verifier_from,
)
from lmm_r1.data.images import encoded_image
from lmm_r1.data.messages import Row, images_of, to_json
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.scoring import ScoredResponse, Scorer, made_up
from lmm_r1.scoring.functions import FunctionScorer
from lmm_r1.scoring.response_scores import JUDGE_SECONDS, VerifierJudge
from remote_rm.client import RewardClient
from remote_rm.verifier import Score

if TYPE_CHECKING:
    from typing_extensions import Self


# Per engine: one answer takes a millisecond, an expression that must be simplified up to a second.
MOST_WORKERS = 4
_ROWS_AT_ONCE = 64


def sum_of(listed: Sequence[ListedReward], scores: Sequence[Score]) -> Score:
    """Return the weighted sum of a response's scores; the first one says what is right.

    Functions log their own parts as `reward/FUNCTION/PART`.
    """
    pairs = list(zip(listed, scores, strict=True))
    parts = {"accuracy": scores[0].parts.get("accuracy", scores[0].score)}
    for one, score in pairs:
        parts[one.name] = one.value(score)
        if is_function(one.source):
            parts |= {f"{one.name}/{name}": value for name, value in score.parts.items()}
    late = any(score.timed_out for score in scores)
    parts |= {"ungradable": max(score.parts.get("ungradable", 0.0) for score in scores), "timed_out": float(late)}
    reward = sum(one.weight * one.value(score) for one, score in pairs)
    return Score(reward=reward, score=scores[0].score, parts=parts, timed_out=late)


class WeightedScorer:
    """The weighted sum of verifiers and functions; the first one says what is right."""

    one_by_one = False

    def __init__(self, parts: Sequence[ListedReward], sources: Sequence[VerifierJudge | FunctionScorer]) -> None:
        self._parts, self._sources = parts, sources

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that one of them cannot score."""
        for source in self._sources:
            source.check_rows(rows)

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the sums, in the order of the responses; raises UserError if one of them does."""
        judged = await asyncio.gather(*(source.rewards(batch) for source in self._sources))
        return [sum_of(self._parts, scores) for scores in zip(*judged, strict=True)]

    async def check_health(self) -> None:
        """Start the workers of the verifiers; raises UserError if they do not start."""
        await asyncio.gather(*(source.check_health() for source in self._sources))

    async def close(self) -> None:
        """End all workers and processes."""
        await asyncio.gather(*(source.close() for source in self._sources))


def make_scorer(reward: RewardConfig, *, given: GivenFunctions | None = None) -> Scorer:
    """Return the source that `--reward.remote_url` names: a client of servers, functions, verifiers, or a sum of both.

    Args:
        given: the functions that are not in a Python file.
    """
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    judge = partial(VerifierJudge, workers=workers, item_timeout_seconds=JUDGE_SECONDS, flag="--reward.remote_url")
    if functions := reward_functions(reward):
        return _with_functions(str(reward.remote_url), functions[0], judge=judge, given=given)
    if (verifier := named_verifier(reward)) is not None:
        return judge(verifier)
    assert reward.remote_url is not None, "only runs with a reward service have a scorer"
    if not any(sign in reward.remote_url for sign in "/.:"):
        # Neither an address nor a file: a mistyped verifier.
        verifier_from(reward.remote_url)
    try:
        client = RewardClient(reward.remote_url.split(","), timeout_s=reward.timeout_s, deadline_s=reward.deadline_s)
    except ValueError as error:
        raise UserError(f"--reward.remote_url: {error}") from error
    return RowClient(client, fields=reward.request_fields)


def _with_functions(
    spec: str, settings: RewardFunction, *, judge: Callable[[str], VerifierJudge], given: GivenFunctions | None
) -> FunctionScorer | WeightedScorer:
    """Return the source of a function, or of a list with functions, which all have these settings."""

    def function(source: str) -> FunctionScorer:
        own = settings.of(source)
        return FunctionScorer(own, given=None if own.path or given is None else given.get(str(own.name)))

    listed = reward_list(spec, flag=settings.flag)
    sources = [function(one.source) if is_function(one.source) else judge(one.source) for one in listed]
    return WeightedScorer(listed, sources) if listed else function(spec)


class RewardFailed(UserError):
    """A reward function failed, which is no fault of the row."""


_Group: TypeAlias = tuple[Row, Sequence[Completion]]


class SourceJudge:
    """Scores responses outside of a run by functions, whose processes end with `with SourceJudge(...)`."""

    def __init__(self, make: Callable[[], FunctionScorer | WeightedScorer]) -> None:
        """Start the processes; raises UserError if a function cannot be loaded."""
        self._make, self._source, self._ended = make, make(), False

    def __enter__(self) -> Self:
        """Start what has ended, and the workers of the verifiers; raises UserError if that fails."""
        if self._ended:
            self._source, self._ended = self._make(), False
        asyncio.run(self._source.check_health())
        return self

    def __exit__(self, *raised: object) -> None:
        """End workers and processes."""
        asyncio.run(self._source.close())
        self._ended = True

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that cannot be scored, and if that of an empty response fails."""
        self._source.check_rows(rows)
        self.score_groups([(rows[0], [Completion(text="", num_tokens=1, finish_reason="stop")])])

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response; raises UserError for an unusable row, RewardFailed if a function fails."""
        self._source.check_rows([row])
        return self.score_groups([(row, responses)])

    def score_groups(self, groups: Sequence[_Group]) -> list[Score]:
        """Return the scores of all responses, row by row; raises RewardFailed if a function fails."""
        found: list[Score] = []
        for (row, _), scores in zip(groups, self.outcomes(groups), strict=True):
            if isinstance(scores, UserError):
                raise RewardFailed(f"{row.location}: {scores}") from scores
            found += scores
        return found

    def outcomes(self, groups: Sequence[_Group]) -> list[list[Score] | UserError]:
        """Return the scores of each row's responses, or why there are none."""

        async def outcomes_of(some: Sequence[_Group]) -> list[list[Score] | UserError]:
            return await asyncio.gather(*(self._outcome(row, responses) for row, responses in some))

        starts = range(0, len(groups), _ROWS_AT_ONCE)
        return [one for at in starts for one in asyncio.run(outcomes_of(groups[at : at + _ROWS_AT_ONCE]))]

    async def _outcome(self, row: Row, responses: Sequence[Completion]) -> list[Score] | UserError:
        batch = [
            replace(made_up(row, one.text), num_tokens=one.num_tokens, token_ids=(), image_scales=one.image_scales)
            for one in responses
        ]
        try:
            self._source.check_rows([row])
            return await self._source.rewards(batch)
        except UserError as error:
            return error


def make_judge(
    spec: str, *, flag: str, workers: int, timeout_s: float | None = None, given: GivenFunctions | None = None
) -> VerifierJudge | SourceJudge:
    """Return what judges outside of RL by a verifier, a function or a list of both, for a `with` block.

    Args:
        timeout_s: that of `--judge_timeout`, for one answer; a function has at least the default of training for a row.
    """
    seconds = JUDGE_SECONDS if timeout_s is None else timeout_s
    judge = partial(VerifierJudge, workers=workers, item_timeout_seconds=seconds, flag=flag)
    if not any(map(is_function, reward_sources(spec, flag=flag))):
        return judge(spec)
    own = None if timeout_s is None else "--judge_timeout"
    settings = RewardFunction(deadline_s=max(seconds, RewardConfig.deadline_s), flag=flag, deadline_flag=own)
    return SourceJudge(partial(_with_functions, spec, settings, judge=judge, given=given))


class RowClient:
    """Scores one response at a time over HTTP, with the fields of `--reward.request_fields`.

    `columns`: `columns` (a JSON object) and `datasources`. `images`: `images`, base64 text of each as it is stored.
    `step`: `steps` and `held_out`. Each key holds a list with one entry per response, as in OpenRLHF.
    """

    one_by_one = True

    def __init__(self, client: RewardClient, *, fields: Sequence[RequestField]) -> None:
        self._client = client
        self._fields = fields

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row with a column that JSON cannot represent."""
        if "columns" not in self._fields:
            return
        for row in rows:
            for name, value in row.columns.items():
                try:
                    json.dumps(value, allow_nan=False)
                except (TypeError, ValueError) as error:
                    raise UserError(
                        f"{row.location}: the column {name} cannot be sent for --reward.request_fields columns, because "
                        f"JSON cannot represent it ({error}); change or drop it, or omit columns"
                    ) from error

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the rewards; raises RewardUnavailable, and UserError for an image that cannot be read."""
        return await asyncio.gather(*map(self._reward, batch))

    async def _reward(self, item: ScoredResponse) -> Score:
        return await self._client.reward(
            query=item.query,
            prompt=to_json(item.row.messages),
            label=item.row.answer,
            response=item.response,
            # Reading image files must not block the engine's event loop.
            further=await asyncio.to_thread(self._further, item) if "images" in self._fields else self._further(item),
        )

    async def check_health(self) -> None:
        """Raise RewardUnavailable unless a reward server answers at every endpoint."""
        await self._client.check_health()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _further(self, item: ScoredResponse) -> dict[str, object]:
        row, moment = item.row, item.moment
        found: dict[str, object] = {"image_scales": item.image_scales} if item.image_scales else {}
        if "columns" in self._fields:
            found |= {"columns": dict(row.columns), "datasources": row.datasource}
        if "images" in self._fields:
            encoded = [encoded_image(part, location=row.location) for part in images_of(row.messages)]
            found["images"] = [base64.b64encode(image).decode("ascii") for image in encoded]
        if "step" in self._fields and moment is not None:
            found |= {"steps": moment.step, "held_out": moment.held_out}
        return found
