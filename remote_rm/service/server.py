"""Runs the HTTP application: binds first, announces itself when it really listens, stops gracefully."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from http import HTTPStatus
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from typing_extensions import Self
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from remote_rm.redaction import hide_in_logs
from remote_rm.registry import MIB
from remote_rm.service.access import HostGate, check_access, is_local
from remote_rm.service.app import create_app
from remote_rm.service.middleware import open_access_log
from remote_rm.verifier import DEFAULT_LIMITS, AskingVerifier, NotReady, ServiceLimits, Verifier

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
MAX_DRAINED_BYTES = 64 * 2**20
"""So much is still taken in of a body that was refused, since a client that is cut off while it sends may not read why."""
SPARE_FILES = 256
"""Open files of the server in addition to connections: sockets of workers, logs, libraries."""


class ConnectionGuard(asyncio.Protocol):
    """Guards one of uvicorn's protocols for HTTP; made by `guarded_protocol`."""

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
        if len(self.server_state.connections) >= self.max_connections:
            self._is_refused = True
            # uvloop's transports are not a subclass of asyncio's.
            self.transport = cast(asyncio.Transport, transport)
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{self.max_connections} connections are open already; try again later"
            )
            return
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
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
    # Of a low limit, such as 256, half is for connections.
    room = max(1, soft - min(SPARE_FILES, soft // 2))
    logger.warning(
        "--max-connections %d: the system allows this process %d open files (ulimit -n), room for %d connections",
        asked,
        soft,
        room,
    )
    return room


REFUSING_SECONDS = 1
"""How long before the end of its grace period a stopping server refuses unanswered requests."""

KEEP_ALIVE_SECONDS = 60
"""Longer than aiohttp's clients keep an idle connection, so that none is closed in the moment of its reuse."""


@dataclass(frozen=True, kw_only=True)
class Announced:
    """The service's name in messages about its address, or the reason why it has none."""

    name: str
    path: str
    """The path after host and port in the address for clients."""


REWARD_SERVER = Announced(name="reward server", path="/get_reward")


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """Where a service listens and what it accepts; the defaults are those of the flags in `registry`."""

    host: str
    port: int
    port_file: Path | None
    limits: ServiceLimits
    token_env: str | None
    insecure: bool
    access_log: Path | None
    log_sample_share: float
    grace_seconds: float

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Read the flags of `add_listening_arguments`, and for a subclass also those of its own fields."""
        given = {own.name: getattr(args, own.name) for own in fields(cls) if own.name != "limits"}
        return cls(limits=limits_of(args), **given)


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ListeningOptions):
    """Where and how a verifier's service runs."""

    workers: int
    item_timeout_seconds: float


def limits_of(args: argparse.Namespace) -> ServiceLimits:
    """Return the limits that the flags give; a service without workers has no flag for their memory."""
    has_workers = "worker_memory_mib" in vars(args)
    return ServiceLimits(
        max_connections=args.max_connections,
        max_request_items=args.max_request_items,
        max_queued_items=args.max_queued_items,
        max_request_bytes=ceil(args.max_request_mib * MIB),
        max_open_bytes=ceil(args.max_open_mib * MIB),
        head_seconds=args.head_timeout_seconds,
        body_seconds=args.body_timeout_seconds,
        worker_memory_bytes=args.worker_memory_mib * MIB if has_workers else DEFAULT_LIMITS.worker_memory_bytes,
    )


class AnnouncingServer(uvicorn.Server):
    """A uvicorn server that announces its address once it listens, and finishes open requests before it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        options: ListeningOptions,
        refuse: Callable[[], None],
        port: int,
        announced: Announced,
    ) -> None:
        """Make a server.

        Args:
            refuse: answers open requests with 503; called when the grace period is nearly over.
        """
        super().__init__(config)
        self._options = options
        self._refuse = refuse
        self._port = port
        self._announced = announced
        self.has_failed = False

    def fail(self, error: BaseException) -> None:
        """Say why the application cannot go on, and stop."""
        logger.error("%s: error: %s", self._announced.name, error)
        self.has_failed = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and the listener, then print the line that scripts wait for."""
        await super().startup(sockets=sockets)
        if not self.started:
            return
        if self._options.port_file is not None:
            try:
                write_atomically(self._options.port_file, text=f"{self._port}\n")
            except OSError as error:
                await self.shutdown(sockets=sockets)
                sys.exit(_unwritable("--port-file", self._options.port_file, error, self._announced))
        address = f"http://{_reachable_host(self._options.host)}:{self._port}{self._announced.path}"
        sys.stdout.write(f"{self._announced.name}: {address}\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests and answer the open ones, or refuse them when the grace period ends."""
        grace = self._options.grace_seconds
        answering = max(grace - REFUSING_SECONDS, grace / 2)
        refusing = asyncio.get_running_loop().call_later(answering, self._refuse)
        self.config.timeout_graceful_shutdown = ceil(grace)
        await super().shutdown(sockets=sockets)
        refusing.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)


def serve(verifier: Verifier, *, options: ServingOptions) -> None:
    """Serve a verifier until SIGINT or SIGTERM; exits with code 1 and one sentence if it cannot listen or start."""
    if isinstance(verifier, AskingVerifier):
        try:
            asyncio.run(verifier.check_ready())
        except NotReady as error:
            sys.exit(f"reward server: error: {error}")

    def make_app(token: str | None) -> FastAPI:
        return create_app(
            verifier,
            workers=options.workers,
            item_timeout_seconds=options.item_timeout_seconds,
            limits=options.limits,
            token=token,
            log_sample_share=options.log_sample_share,
        )

    serve_app(make_app, options=options)


def serve_app(
    make_app: Callable[[str | None], FastAPI], *, options: ListeningOptions, announced: Announced = REWARD_SERVER
) -> None:
    """Serve an application until SIGINT or SIGTERM; exits with code 1 if it cannot listen or start.

    Args:
        make_app: (token) -> application, such as one of `create_service`, whose `state.refuse()` ends all that is open; called
            once the address is had, since it may take long.
    """
    hide_in_logs()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = _token(options.token_env, announced)
    _open_access_log(options.access_log, announced)
    listener = bind(options.host, port=options.port, announced=announced)
    try:
        try:
            check_access(options.host, token=token, is_insecure=options.insecure)
        except ValueError as error:
            sys.exit(f"{announced.name}: error: {error}")
        if options.port_file is not None:
            _clear(options.port_file, announced)
        app = make_app(token)
        if is_local(options.host):
            app.add_middleware(HostGate)
        server = _server(app, options=options, port=listener.getsockname()[1], announced=announced)
        app.state.fail = server.fail
        # uvicorn stops gracefully and then raises the signal again: end by exiting, so that temporary files are removed.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        server.run(sockets=[listener])
    finally:
        listener.close()
    if server.has_failed or not server.started:
        sys.exit(1)


def _server(app: FastAPI, *, options: ListeningOptions, port: int, announced: Announced) -> AnnouncingServer:
    limits = options.limits
    protocol = guarded_protocol(
        max_connections=connections_within(limits.max_connections), head_seconds=limits.head_seconds
    )
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        # If uvicorn has only h11, whose own limit would answer a large head with 400 before the guard explains it.
        h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
    )
    return AnnouncingServer(config, options=options, refuse=app.state.refuse, port=port, announced=announced)


def bind(host: str, *, port: int, announced: Announced) -> socket.socket:
    """Return a bound socket; exits with code 1 and one sentence if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        sys.exit(
            f"{announced.name}: error: --host {host} is no address of this machine ({error}); choose another, "
            "such as 127.0.0.1"
        )
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        sys.exit(
            f"{announced.name}: error: cannot listen on {host}:{port} ({error.strerror}); "
            "stop what uses that port, choose another --port, or let --port 0 pick a free one"
        )
    return listener


def _token(name: str | None, announced: Announced) -> str | None:
    """The token in an environment variable; exits with code 1 and one sentence if it holds none."""
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token:
        sys.exit(
            f"{announced.name}: error: --token-env {name}: the environment variable {name} is not set; "
            f"export it, for example {name}=$(openssl rand -hex 16), or leave the flag out"
        )
    return token


def _open_access_log(file: Path | None, announced: Announced) -> None:
    try:
        open_access_log(file)
    except OSError as error:
        sys.exit(_unwritable("--access-log", file, error, announced))


def _clear(port_file: Path, announced: Announced) -> None:
    """Remove the file of an earlier server; exits with code 1 and one sentence if none can be written."""
    try:
        port_file.parent.mkdir(parents=True, exist_ok=True)
        port_file.unlink(missing_ok=True)
    except OSError as error:
        sys.exit(_unwritable("--port-file", port_file, error, announced))


def _unwritable(flag: str, file: Path | None, error: OSError, announced: Announced) -> str:
    return f"{announced.name}: error: {flag} {file} cannot be written ({error.strerror}); choose another place"


def write_atomically(path: Path, *, text: str) -> None:
    """Write a file so that a reader sees all of it or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _reachable_host(host: str) -> str:
    """The host to put into a URL: the wildcard address is reached through the loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
