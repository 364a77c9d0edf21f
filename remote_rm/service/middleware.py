"""What stands before the application: who may ask, how much may be sent, and a record of every request."""

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset(("/health",))
"""Answered without a token, so that whatever watches over the service needs none."""


@dataclass(kw_only=True)
class RequestRecord:
    """What is known of one request when it has been answered."""

    method: str
    path: str
    client: str
    status: int = 500
    """That of the reply; 500 where the application raised instead of replying."""
    seconds: float = 0.0
    items: int = 0
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Sampled items with their scores."""


class Observer:
    """Hands a record of every request to `on_answered`; the application fills in its items as `request.state.record`."""

    def __init__(self, app: ASGIApp, *, on_answered: Callable[[RequestRecord], None]) -> None:
        self._app = app
        self._on_answered = on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on and record it; other events than requests pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        record = RequestRecord(
            method=scope["method"], path=scope["path"], client=f"{client[0]}:{client[1]}" if client else ""
        )
        scope.setdefault("state", {})["record"] = record
        started = time.perf_counter()

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            record.seconds = time.perf_counter() - started
            self._on_answered(record)


class TokenGate:
    """Answers 401 to a request without `Authorization: Bearer TOKEN`; lets everything pass where the token is None."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on or refuse it, before any of its body is read."""
        if self._expected is None or scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"detail": "this service wants a token: send the header `Authorization: Bearer TOKEN`"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        assert self._expected is not None
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers come as latin-1, so that they can be turned back into the bytes that were sent.
        is_same = hmac.compare_digest(token.strip().encode("latin-1"), self._expected)
        return is_same and scheme.lower() == "bearer"


class BodyLimit:
    """Answers 413 as soon as more than `max_bytes` of a body have come in, or are announced."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, counting the bytes of its body while they come in."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await JSONResponse({"detail": self._reason()}, status_code=413)(scope, receive, send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(status_code=413, detail=self._reason())
            return message

        await self._app(scope, counted_receive, send)

    def _reason(self) -> str:
        return f"the request is larger than {self._max_bytes / 2**20:g} MiB; send fewer samples at once"


class Abandonment:
    """Cancels what is done for a client that has gone away; its request ends with 499, which nobody reads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and look for its client's end once its body has come in."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_body = asyncio.Event()

        async def watched_receive() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                has_body.set()
            return message

        async def client_end() -> None:
            await has_body.wait()
            while (await receive())["type"] != "http.disconnect":
                pass

        answering = asyncio.ensure_future(self._app(scope, watched_receive, send))
        watching = asyncio.ensure_future(client_end())
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            is_abandoned = not answering.done()
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.wait((answering, watching))
        if is_abandoned:
            await JSONResponse({"detail": "the client went away"}, status_code=499)(scope, receive, send)
        else:
            answering.result()
