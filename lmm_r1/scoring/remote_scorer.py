"""Scores of responses by reward servers over HTTP, for commands that score row by row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from typing_extensions import Self

from lmm_r1.data.messages import Row, to_json
from lmm_r1.errors import UserError
from lmm_r1.scoring.response_scores import Response
from remote_rm.client import RewardClient, RewardRefused, RewardUnavailable, Sample
from remote_rm.verifier import Score


class RemoteScorer:
    """Scores by reward servers, from `with RemoteScorer(...)` to the end of the block."""

    def __init__(self, addresses: str, *, flag: str) -> None:
        """Take the addresses of servers, separated by commas; raises UserError for what is none.

        Args:
            flag: that names them, for messages.
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

    def score(self, row: Row, responses: Sequence[Response]) -> list[Score]:
        """Return one score per response.

        Raises UserError for a row that a server refuses, and RewardUnavailable where none answers.
        """
        prompt = to_json(row.messages)
        samples = [
            Sample(
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


def query_of(prompt: str, response: Response) -> str:
    """Return prompt and response; a response that was not ended by the model stands at the very end."""
    return f"{prompt}\n{response.text}" + ("\n" if response.finish_reason == "stop" else "")
