"""The sources of rewards: reward servers over HTTP, a Python function, or a verifier by its name."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from lmm_r1.config.ppo import RequestField, RewardConfig
from lmm_r1.config.rewards import named_verifier, reward_function
from lmm_r1.data.images import encoded_image
from lmm_r1.data.messages import Row, images_of, to_json
from lmm_r1.errors import UserError
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.functions import FunctionScorer
from lmm_r1.scoring.response_scores import JUDGE_SECONDS, VerifierJudge
from remote_rm.client import RewardClient
from remote_rm.registry import verifier_class
from remote_rm.verifier import Item, PoolUnavailable, Score

# Per engine: one answer takes a millisecond, an expression that must be simplified up to a second.
MOST_WORKERS = 4


class VerifierScorer:
    """A verifier that is given all responses to one prompt at once; its workers start with the first of them."""

    def __init__(self, spec: str) -> None:
        """Take a verifier by the name that `verifier_from` reads; raises UserError for an unknown one."""
        workers = min(MOST_WORKERS, os.cpu_count() or 1)
        self._judge = VerifierJudge(
            spec, workers=workers, item_timeout_seconds=JUDGE_SECONDS, flag="--reward.remote_url"
        )
        self._starting = threading.Lock()
        self._started = False

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row whose answer the verifier does not accept."""
        self._judge.check_labels(rows)

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the score of each response, in their order; raises UserError if the workers do not start."""
        prompt = to_json(batch[0].row.messages)
        items = [
            Item(prompt=prompt, response=item.response, label=item.row.answer, image_scales=item.image_scales)
            for item in batch
        ]
        return await asyncio.to_thread(self._judged, items)

    def _judged(self, items: Sequence[Item]) -> list[Score]:
        self._start()
        try:
            scores = self._judge.judge(items)
        except PoolUnavailable as error:
            raise UserError(f"--reward.remote_url {self._judge.name}: {error}") from error
        return [replace(score, parts=score.parts | {"timed_out": float(score.timed_out)}) for score in scores]

    def _start(self) -> None:
        with self._starting:
            if not self._started:
                self._judge.__enter__()
                self._started = True

    async def check_health(self) -> None:
        """Start the workers; raises UserError if a model that judges is not available."""
        await asyncio.to_thread(self._start)

    async def close(self) -> None:
        """End the workers."""
        if self._started:
            await asyncio.to_thread(self._judge.__exit__, None, None, None)
            self._started = False


class _Source(Protocol):
    async def check_health(self) -> None: ...

    async def close(self) -> None: ...


class ResponseSource(_Source, Protocol):
    """Scores one response as soon as it is available; raises an error if there is no reward, and never returns without one."""

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
    """Scores one response, like a `ResponseSource`, given everything that is known about it."""

    async def reward_of(self, item: ScoredResponse) -> Score: ...


@runtime_checkable
class GroupSource(_Source, Protocol):
    """Scores all responses to a prompt at once, in their order."""

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]: ...


Scorer: TypeAlias = ResponseSource | RowSource | GroupSource


@runtime_checkable
class RowChecker(Protocol):
    """A source that does not accept every row."""

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that cannot be scored."""


def make_scorer(reward: RewardConfig, *, given: Callable[..., Any] | None = None) -> Scorer:
    """Return the source that `--reward.remote_url` names: a client of servers, a function, or a verifier.

    Args:
        given: the function itself, if it is not in a Python file.
    """
    function = reward_function(reward)
    if function is not None:
        return FunctionScorer(function, given=given)
    if (verifier := named_verifier(reward)) is not None:
        return VerifierScorer(verifier)
    assert reward.remote_url is not None, "only runs with a reward service have a scorer"
    if not any(sign in reward.remote_url for sign in "/.:"):
        # Neither an address nor a file: a mistyped verifier.
        try:
            verifier_class(reward.remote_url)
        except ValueError as error:
            raise UserError(
                f"--reward {reward.remote_url}: {error}. Give a verifier, FILE.py or http://HOST:PORT/get_reward"
            ) from error
    try:
        client = RewardClient(reward.remote_url.split(","), timeout_s=reward.timeout_s, deadline_s=reward.deadline_s)
    except ValueError as error:
        raise UserError(f"--reward.remote_url: {error}") from error
    return RowClient(client, fields=reward.request_fields) if reward.request_fields else client


class RowClient:
    """Scores one response at a time over HTTP, and sends the fields that `--reward.request_fields` names.

    `columns`: `columns` (a JSON object) and `datasources`. `images`: `images`, base64 text of each as it is stored.
    `step`: `steps` and `held_out`. Each key holds a list with one entry per response, as in OpenRLHF.
    """

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

    async def reward_of(self, item: ScoredResponse) -> Score:
        """Return the reward of a response; raises RewardUnavailable, and UserError for an image that cannot be read."""
        return await self._client.reward(
            query=item.query,
            prompt=to_json(item.row.messages),
            label=item.row.answer,
            response=item.response,
            # Reading files must not block the engine's event loop.
            further=await asyncio.to_thread(self._further, item),
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
