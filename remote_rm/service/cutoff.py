"""Ends what is done for one request before it is done, with a reply: its client is gone, late, or the server stops."""

import asyncio
import sys
from collections.abc import Awaitable

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send


class Cutoff:
    """Runs what answers a request, in the task that it is made in, until that is done or `now` is called."""

    def __init__(self, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "a request is answered in a task"
        self._task = task
        self._send = send
        self._has_started = False
        self._reply: JSONResponse | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the reply."""
        self._has_started = True
        await self._send(message)

    def now(self, reply: JSONResponse) -> None:
        """Cancel what answers the request, and reply this, unless a reply is on its way."""
        if self._reply is None and not self._has_started:
            self._reply = reply
            self._task.cancel()

    async def run(self, answering: Awaitable[None], *, scope: Scope, receive: Receive) -> None:
        """Wait for what answers the request with `send`, or reply in its stead."""
        try:
            await answering
            if self._reply is not None:
                # The cancellation came too late, and is still on its way: it ends here, not in a later await.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._reply is None:
                raise
            if sys.version_info >= (3, 11):
                self._task.uncancel()
            if not self._has_started:
                await self._reply(scope, receive, self._send)


def refusal(status: int, detail: str, *, retry_after_seconds: int | None = None, **told: int) -> JSONResponse:
    """Return a reply without rewards, which says why.

    Args:
        told: numbers that clients read, beside the sentence.
    """
    headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
    return JSONResponse({"detail": detail, **told}, status_code=status, headers=headers)


def last_refusal(status: int, detail: str, *, retry_after_seconds: int | None = None) -> JSONResponse:
    """Return a reply after which the connection is closed: what else comes over it would be the rest of a body."""
    reply = refusal(status, detail, retry_after_seconds=retry_after_seconds)
    reply.headers["Connection"] = "close"
    return reply
