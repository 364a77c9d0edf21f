"""The sources of scores and rewards: verifiers by name, Python functions, reward models and servers, and sums of them."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

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
from remote_rm.client import RewardClient, RewardRefused, RewardUnavailable, SentSample
from remote_rm.service.pool import BlockingPool
from remote_rm.verifier import Item, NotReady, PoolUnavailable, Score

if TYPE_CHECKING:
    from typing_extensions import Self


JUDGE_SECONDS = 5.0


class ResponseScorer(Protocol):
    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response; raises UserError for a row that cannot be scored."""


class VerifierJudge:
    """Scores by a verifier, in `with VerifierJudge(...)`, or for training, which awaits `rewards`.

    Its worker processes are killed at a time limit, so that no response can hang a command.
    """

    one_by_one = False

    def __init__(
        self, verifier_name: str, *, workers: int, item_timeout_seconds: float, flag: str = "--reward"
    ) -> None:
        """Take a verifier by the name that `verifier_from` reads; raises UserError for an unknown one.

        Args:
            item_timeout_seconds: an answer that takes longer counts as wrong, and its score says so.
            flag: the flag that names the verifier, for messages.
        """
        self.name = verifier_name
        self._told = f"{flag} {verifier_name}"
        self.verifier = verifier_from(verifier_name, flag=flag)
        self._pool = BlockingPool(self.verifier, workers=workers, item_timeout_seconds=item_timeout_seconds)
        self._starting = threading.Lock()
        self._started = False

    def __enter__(self) -> Self:
        """Start the workers; raises RuntimeError if one does not start, UserError if a judge is not available."""
        with self._starting:
            if not self._started:
                try:
                    self._pool.start()
                except NotReady as error:
                    raise UserError(str(error)) from error
                self._started = True
        return self

    def __exit__(self, *raised: object) -> None:
        """End the workers, even while they judge."""
        if self._started:
            self._pool.stop()
            self._started = False

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row whose answer the verifier does not accept as a label."""
        for row in rows:
            try:
                self.verifier.check_label(row.answer)
            except ValueError as error:
                raise UserError(f"{row.location}: {self.name} cannot judge by this row's answer: {error}") from error

    def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; an item that is not judged in time is wrong."""
        return self._pool.judge(items)

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response; raises UserError for a row whose answer the verifier does not accept."""
        self.check_rows([row])
        return self.judge([_item(row, response=one.text, image_scales=one.image_scales) for one in responses])

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the score of each response, in their order; raises UserError if the workers do not start."""
        items = [_item(one.row, response=one.response, image_scales=one.image_scales) for one in batch]
        try:
            scores = await asyncio.to_thread(lambda: self.__enter__().judge(items))
        except PoolUnavailable as error:
            raise UserError(f"{self._told}: {error}") from error
        return [replace(score, parts=score.parts | {"timed_out": float(score.timed_out)}) for score in scores]

    async def check_health(self) -> None:
        """Start the workers; raises UserError if a model that judges is not available."""
        await asyncio.to_thread(self.__enter__)

    async def close(self) -> None:
        """End the workers."""
        await asyncio.to_thread(self.__exit__)


def _item(row: Row, *, response: str, image_scales: tuple[tuple[float, float], ...]) -> Item:
    return Item(prompt=to_json(row.messages), response=response, label=row.answer, image_scales=image_scales)


class RewardModelScorer:
    """Scores by a trained reward model."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        max_len: int,
        max_batch_tokens: int | None,
        normalize: bool,
        trust_remote_code: bool,
    ) -> None:
        """Args: dtype: as PyTorch names it; `auto` is the checkpoint's own, else fp32."""
        import torch

        from lmm_r1.config.ppo import PPODeepSpeedConfig
        from lmm_r1.lmm_kits import Checkpoint
        from lmm_r1.models.loading import DTYPES
        from lmm_r1.scoring.reward_model import RewardModel

        config = Checkpoint(path, trust_remote_code=trust_remote_code).config
        wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
        self._model = RewardModel(
            path,
            dtype=next((name for name, known in DTYPES.items() if known == wanted), "fp32"),
            max_len=max_len,
            max_batch_tokens=max_batch_tokens,
            value_head_prefix=PPODeepSpeedConfig.value_head_prefix,
            normalize=normalize,
            trust_remote_code=trust_remote_code,
        )
        self._path = path

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return the rewards; raises UserError for a row that the model cannot take."""
        samples = [
            # As in training, a response that was cut off has no end token.
            self._model.encode(row, response.text, ending=None if response.finish_reason == "stop" else "")
            for response in responses
        ]
        rewards = self._model.score(samples)
        for reward in rewards:
            if not math.isfinite(reward):
                raise UserError(f"{row.location}: {self._path} gives the reward {reward}; is the checkpoint complete?")
        return [Score(reward=reward, score=reward, parts={}) for reward in rewards]


class RemoteScorer:
    """Scores by reward servers; usable inside `with RemoteScorer(...)`."""

    def __init__(self, addresses: str, *, flag: str) -> None:
        """Take the addresses of servers, separated by commas; raises UserError for invalid ones.

        Args:
            flag: the flag that names them, for messages.
        """
        self._flag = f"{flag} {addresses}"
        try:
            self._client = RewardClient(addresses.split(","))
        except ValueError as error:
            raise UserError(f"{flag}: {error}") from error
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        """Raise UserError unless a reward server answers at every address."""
        try:
            self._loop.run_until_complete(self._client.check_health())
        except RewardUnavailable as error:
            self.__exit__()
            raise UserError(f"{self._flag}: {error}") from error
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the connections."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response.

        Raises UserError for a row that a server refuses, and RewardUnavailable if none answers.
        """
        prompt = to_json(row.messages)
        samples = [
            SentSample(
                query=query_of(prompt, response),
                prompt=prompt,
                label=row.answer,
                response=response.text,
                further={"image_scales": response.image_scales} if response.image_scales else {},
            )
            for response in responses
        ]
        try:
            return self._loop.run_until_complete(self._client.reward_batch(samples))
        except RewardRefused as error:
            raise UserError(f"{row.location}: {error}") from error


def query_of(prompt: str, response: Completion) -> str:
    """Return prompt and response, followed by a newline if the model ended the response."""
    return f"{prompt}\n{response.text}" + ("\n" if response.finish_reason == "stop" else "")


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
