"""Middleware before the application: access, limits on what may be sent, and a record of every request."""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remote_rm.verifier import STOPPING, PoolUnavailable, ServiceLimits


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
        told: numbers for clients, in addition to the sentence.
    """
    headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
    return JSONResponse({"detail": detail, **told}, status_code=status, headers=headers)


def last_refusal(status: int, detail: str, *, retry_after_seconds: int | None = None) -> JSONResponse:
    """Return a reply after which the connection is closed: what else comes over it would be the rest of a body."""
    reply = refusal(status, detail, retry_after_seconds=retry_after_seconds)
    reply.headers["Connection"] = "close"
    return reply


OPEN_PATHS = frozenset(("/health",))
"""Answered without a token, so that whatever watches over the service needs none."""
LARGE_BYTES = 2**20
TRIM_SECONDS = 1.0
LOOK_AFTER_SECONDS = 0.05
"""How long a request may take before it is looked whether its client is still there."""


@dataclass(kw_only=True)
class RequestRecord:
    """The record of an answered request."""

    method: str
    path: str
    client: str
    status: int = 500
    """The status of the reply; 500 if the application raised an error instead."""
    seconds: float = 0.0
    items: int = 0
    rollouts: list[Mapping[str, object]] = field(default_factory=list)
    """Sampled items with their scores."""


class Observer:
    """Hands a record of every request to `on_answered`; the application fills in its items as `request.state.record`."""

    def __init__(self, app: ASGIApp, *, on_answered: Callable[[RequestRecord], None]) -> None:
        self._app = app
        self._on_answered = on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """Answers 401 to a request without `Authorization: Bearer TOKEN`; passes everything on if the token is None."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


class OpenBodies:
    """The bodies that are coming in or being worked on, of all requests."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._coming_in: set[Cutoff] = set()
        self._trimming: asyncio.TimerHandle | None = None
        self._is_refusing = False

    def take(self, count: int) -> bool:
        """Count received bytes, and return whether there is room for them."""
        self._bytes += count
        return self._bytes <= self._max_bytes

    def give_back(self, count: int) -> None:
        """Forget the bytes of a request that was answered; soon after a large one the system has its memory back."""
        self._bytes -= count
        if count > LARGE_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        # glibc keeps what was freed between things that still live; other C libraries have no such call.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def begins(self, cutoff: Cutoff) -> None:
        """Note a body of which more is to come."""
        self._coming_in.add(cutoff)
        if self._is_refusing:
            cutoff.now(last_refusal(503, STOPPING, retry_after_seconds=1))

    def ends(self, cutoff: Cutoff) -> None:
        """Note that a body is there, or given up."""
        self._coming_in.discard(cutoff)

    def refuse(self) -> None:
        """Answer 503 to all that are still coming in, now and from now on."""
        self._is_refusing = True
        for cutoff in list(self._coming_in):
            cutoff.now(last_refusal(503, STOPPING, retry_after_seconds=1))


class BodyLimit:
    """Answers 413 as soon as more than `max_bytes` of a body have come in or are announced, and 408 if it takes too long.

    Answers 503 if the bodies of all requests together leave no room.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float, open_bodies: OpenBodies) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._open = open_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await refusal(413, self._too_large())(scope, receive, send)
            return
        received = 0
        cutoff = Cutoff(send)
        late = asyncio.get_running_loop().call_later(self._seconds, lambda: cutoff.now(self._too_late()))

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            count = len(message.get("body", b""))
            received += count
            has_room = self._open.take(count)
            if not message.get("more_body", False):
                late.cancel()
                self._open.ends(cutoff)
            if received > self._max_bytes:
                raise HTTPException(status_code=413, detail=self._too_large())
            if not has_room:
                headers = {"Retry-After": "1"}
                raise HTTPException(status_code=503, detail="too much is being judged; try again", headers=headers)
            return message

        self._open.begins(cutoff)
        try:
            await cutoff.run(self._app(scope, counted_receive, cutoff.send), scope=scope, receive=receive)
        finally:
            late.cancel()
            self._open.ends(cutoff)
            self._open.give_back(received)

    def _too_large(self) -> str:
        return f"the request is larger than {self._max_bytes / 2**20:g} MiB; send fewer samples at once"

    def _too_late(self) -> JSONResponse:
        return last_refusal(408, f"the body did not come in within {self._seconds:g} s; send fewer samples at once")


class Abandonment:
    """Cancels the work for a client that has disconnected; its request ends with 499."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        cutoff = Cutoff(send)
        watching: asyncio.Task[None] | asyncio.TimerHandle | None = None

        async def client_end() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            cutoff.now(JSONResponse({"detail": "the client went away"}, status_code=499))

        def watch() -> None:
            nonlocal watching
            watching = loop.create_task(client_end())

        async def watched_receive() -> Message:
            nonlocal watching
            message = await receive()
            if not message.get("more_body", False) and watching is None:
                # Most requests are answered by then, and a task for each would cost more than their judging.
                watching = loop.call_later(LOOK_AFTER_SECONDS, watch)
            return message

        try:
            await cutoff.run(self._app(scope, watched_receive, cutoff.send), scope=scope, receive=receive)
        finally:
            if watching is not None:
                watching.cancel()


def guard(
    app: Starlette,
    *,
    limits: ServiceLimits,
    token: str | None,
    on_answered: Callable[[RequestRecord], None],
    refuse: Callable[[], None],
) -> None:
    """Put all of this before an application, and give it `app.state.refuse()`, which ends all that is open.

    Args:
        token: what a request must bring as its bearer token; None asks for none.
        on_answered: gets the record of each request.
        refuse: ends what the application itself has open.
    """
    open_bodies = OpenBodies(max_bytes=limits.max_open_bytes)

    def refuse_all() -> None:
        open_bodies.refuse()
        refuse()

    app.state.refuse = refuse_all
    # The last one added runs first.
    app.add_middleware(Abandonment)
    app.add_middleware(
        BodyLimit, max_bytes=limits.max_request_bytes, seconds=limits.body_seconds, open_bodies=open_bodies
    )
    app.add_middleware(TokenGate, token=token)
    app.add_middleware(Observer, on_answered=on_answered)
    app.add_exception_handler(ClientDisconnect, _note_disconnect)
    app.add_exception_handler(PoolUnavailable, _refuse_for_now)


async def _note_disconnect(_request: Request, _error: Exception) -> JSONResponse:
    """Reply to a client that disconnected while sending (499), which only the log shows."""
    return refusal(499, "the client went away")


async def _refuse_for_now(_request: Request, error: Exception) -> JSONResponse:
    """Say when to come back (503)."""
    assert isinstance(error, PoolUnavailable)
    return refusal(503, str(error), retry_after_seconds=error.retry_after_seconds)


logger = logging.getLogger(__name__)

MAX_TEXT_CHARS = 20_000
"""A longer text is logged without its middle."""


class _FileHandler(WatchedFileHandler):
    """Says in one sentence, once for each time that it begins, that no more lines can be written."""

    _fails = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._fails:
            self._fails = True
            logging.getLogger(__package__).warning(
                "--access-log %s cannot be written (%s): lines are missing until there is room; requests are answered",
                self.baseFilename,
                error.strerror,
            )

    def flush(self) -> None:
        super().flush()
        self._fails = False


class RolloutSampler:
    """Takes every Nth item over all requests, starting with the first.

    Raises ValueError for a share outside 0 to 1.
    """

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"the share of logged items must be from 0 to 1, got {share}")
        self._step = round(1 / share) if share else None
        self._seen = 0

    def rollouts(self, items: Sequence[Any], scores: Sequence[Any]) -> list[Mapping[str, object]]:
        """Return those of the items whose turn it is, with their scores."""
        if self._step is None:
            return []
        first = -self._seen % self._step
        self._seen += len(items)
        return [_rollout(items[index], scores[index]) for index in range(first, len(items), self._step)]


def log_request(record: RequestRecord) -> None:
    """Write the line of one request to this module's logger, at level INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "items": record.items,
        "ms": round(1000 * record.seconds, 3),
    }
    logger.info(json.dumps(line | ({"rollouts": record.rollouts} if record.rollouts else {})))


def open_access_log(file: Path | None) -> None:
    """Send only the lines to a file, or to stderr for None; raises OSError if it cannot be written.

    The file is appended to, and opened again when something else has moved it away.
    """
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.StreamHandler() if file is None else _FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    for earlier in logger.handlers[:]:
        logger.removeHandler(earlier)
        earlier.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _rollout(item: Any, score: Any) -> Mapping[str, object]:
    given = {name: value for name, value in asdict(item).items() if value not in (None, ())}
    clipped = {name: _clipped(value) for name, value in given.items() if isinstance(value, str)}
    return given | clipped | asdict(score)


def _clipped(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
