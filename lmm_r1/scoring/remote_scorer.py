"""Scores of responses by reward servers over HTTP, for commands that score row by row."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from types import TracebackType

from typing_extensions import Self

from lmm_r1.config.ppo import RequestField
from lmm_r1.data.images import encoded_image
from lmm_r1.data.messages import Row, images_of, to_json
from lmm_r1.errors import UserError
from lmm_r1.scoring.response_scores import ScorableResponse
from lmm_r1.scoring.scored_response import ScoredResponse
from remote_rm.client import RewardClient, RewardRefused, RewardUnavailable, SentSample
from remote_rm.verifier import Score


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
            self._close()
            raise UserError(f"{self._flag}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self._close()

    def score(self, row: Row, responses: Sequence[ScorableResponse]) -> list[Score]:
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

    def _close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


def query_of(prompt: str, response: ScorableResponse) -> str:
    """Return prompt and response, followed by a newline if the model ended the response."""
    return f"{prompt}\n{response.text}" + ("\n" if response.finish_reason == "stop" else "")


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
