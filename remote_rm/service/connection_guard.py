"""What uvicorn lacks of limits: how many connections there may be, and how long and large the head of a request.

Its own `limit_concurrency` answers 503 to requests but keeps their connections, and it waits for a head for ever.
"""

import asyncio
import json
import logging
import resource
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
MAX_DRAINED_BYTES = 64 * 2**20
"""So much is still taken in of a body that was refused, since a client that is cut off while it sends may not read why."""
SPARE_FILES = 256
"""Open files of the server beside connections: sockets of workers, logs, libraries."""


class ConnectionGuard(asyncio.Protocol):
    """Stands in front of one of uvicorn's protocols for HTTP; made by `guarded_protocol`."""

    max_connections: int
    head_seconds: float
    # What uvicorn's protocols have.
    cycle: Any
    server_state: Any
    transport: asyncio.Transport

    _is_refused = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection on, or refuse it."""
        if len(self.server_state.connections) >= self.max_connections:
            self._is_refused = True
            # uvloop's transports are no subclass of asyncio's.
            self.transport = cast(asyncio.Transport, transport)
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{self.max_connections} connections are open already; try again later"
            )
            return
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Pass data on, and refuse a head that grows too large."""
        if self._is_refused:
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_head()
            return
        if self._head_timer is None:
            self._await_head()
        self._head_bytes += len(data)
        if self._is_draining:
            if self._head_bytes > MAX_DRAINED_BYTES:
                self.transport.close()
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too large")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_head()
        if self.transport is not None and self in self.server_state.connections:
            super().connection_lost(exc)

    @property
    def _is_draining(self) -> bool:
        """Whether what comes in may be the rest of a body whose request has been refused."""
        return self.cycle is not None and self.cycle.more_body

    def _await_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(self.head_seconds, self._end_waiting)

    def _forget_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_waiting(self) -> None:
        self._head_timer = None
        if self._head_bytes and not self._is_draining:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT, f"the head of the request did not come in within {self.head_seconds:g} s"
            )
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Answer without the application, and close the connection."""
        body = json.dumps({"detail": detail}).encode()
        retry = "Retry-After: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()


def guarded_protocol(
    *, max_connections: int, head_seconds: float, base: type[asyncio.Protocol] = AutoHTTPProtocol
) -> type[asyncio.Protocol]:
    """Return one of uvicorn's protocols for HTTP, by default the faster one that is installed, with these limits."""
    limits = {"max_connections": max_connections, "head_seconds": head_seconds}
    return type("GuardedProtocol", (ConnectionGuard, base), limits)


def connections_within(asked: int) -> int:
    """Return how many connections the system's limit of open files has room for, raised as far as that may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = asked + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return asked
    room = max(1, soft - SPARE_FILES)
    logger.warning(
        "--max-connections %d: the system allows this process %d open files (ulimit -n), room for %d connections",
        asked,
        soft,
        room,
    )
    return room
