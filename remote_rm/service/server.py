"""Runs the HTTP application: binds first, announces itself when it really listens, stops gracefully."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import NoReturn

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from remote_rm.redaction import hide_in_logs
from remote_rm.registry import MIB
from remote_rm.service.access import HostGate, check_access, is_local
from remote_rm.service.app import create_app
from remote_rm.verifier import AskingVerifier, NotReady, ServiceLimits, Verifier

MAX_HEAD_BYTES = 64 * 2**10
HEAD_SECONDS = 10.0
"""From the start of a connection, or the first byte of a later request, to the end of the request's head."""
KEEP_ALIVE_SECONDS = 60
"""Longer than aiohttp's clients keep an idle connection, so that none is closed in the moment of its reuse."""
SPARE_FILES = 256
"""Open files of the server in addition to connections: pipes of workers, logs, libraries."""


class HeadDeadline(H11Protocol):
    """Closes a connection on which the head of a request takes too long, which uvicorn waits for without limit."""

    seconds = HEAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        awaits_head = self.cycle is None or self.cycle.response_complete
        if awaits_head and self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self.transport.close)
        elif not awaits_head and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class AnnouncingServer(uvicorn.Server):
    """A uvicorn server that announces its address once it listens."""

    def __init__(self, config: uvicorn.Config, *, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._announce()


def serve(verifier: Verifier, args: argparse.Namespace) -> None:
    """Serve a verifier until SIGINT or SIGTERM; exits with code 1 and one sentence if it cannot listen or start.

    Args:
        args: the flags of `registry.add_serving_arguments`.
    """
    if isinstance(verifier, AskingVerifier):
        try:
            asyncio.run(verifier.check_ready())
        except NotReady as error:
            _exit(str(error))

    def make_app(token: str | None) -> FastAPI:
        return create_app(
            verifier,
            workers=args.workers,
            item_timeout_seconds=args.item_timeout_seconds,
            worker_memory_bytes=args.worker_memory_mib * MIB,
            limits=limits_of(args),
            token=token,
        )

    serve_app(make_app, args)


def limits_of(args: argparse.Namespace) -> ServiceLimits:
    """Return the limits that the flags give."""
    return ServiceLimits(max_request_items=args.max_request_items, max_request_bytes=ceil(args.max_request_mib * MIB))


def serve_app(make_app: Callable[[str | None], FastAPI], args: argparse.Namespace) -> None:
    """Serve an application until SIGINT or SIGTERM; exits with code 1 if it cannot listen or start.

    Args:
        make_app: (token) -> application; called once the address is had, since it may take long.
        args: the flags of `registry.add_listening_arguments`.
    """
    hide_in_logs()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = None if args.token_env is None else os.environ.get(args.token_env, "").strip()
    if token == "":
        _exit(
            f"--token-env {args.token_env}: the environment variable {args.token_env} is not set; export it, for "
            f"example {args.token_env}=$(openssl rand -hex 16), or leave the flag out"
        )
    with _bound(args.host, args.port) as listener:
        try:
            check_access(args.host, token=token, is_insecure=args.insecure)
        except ValueError as error:
            _exit(str(error))
        # That of an earlier server.
        _written(args.port_file, None)
        app = make_app(token)
        if is_local(args.host):
            app.add_middleware(HostGate)
        port = listener.getsockname()[1]

        def announce() -> None:
            _written(args.port_file, f"{port}\n")
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
            sys.stdout.write(f"reward server: http://{f'[{host}]' if ':' in host else host}:{port}/get_reward\n")
            sys.stdout.flush()

        server = AnnouncingServer(_config(app, args), announce=announce)
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        # uvicorn stops gracefully and then raises the signal again: end by exiting, so that temporary files are removed.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        server.run(sockets=[listener])
    if not server.started:
        sys.exit(1)


def _config(app: FastAPI, args: argparse.Namespace) -> uvicorn.Config:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = args.max_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return uvicorn.Config(
        app,
        http=HeadDeadline,
        ws="none",
        log_config=None,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=ceil(args.grace_seconds),
        limit_concurrency=args.max_connections,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        _exit(
            f"cannot listen on {host}:{port} ({error.strerror}); choose an address of this machine, such as 127.0.0.1, "
            "and a free --port, or let --port 0 pick one"
        )
    return listener


def _written(port_file: Path | None, text: str | None) -> None:
    """Write the file at once as a whole, or remove it."""
    if port_file is None:
        return
    try:
        port_file.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            port_file.unlink(missing_ok=True)
            return
        unfinished = port_file.with_name(f".{port_file.name}.{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(port_file)
    except OSError as error:
        _exit(f"--port-file {port_file} cannot be written ({error.strerror}); choose another place")


def _exit(sentence: str) -> NoReturn:
    sys.exit(f"reward server: error: {sentence}")
