"""Runs the HTTP application: binds first, announces itself when it really listens, stops gracefully."""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from remote_rm.service.access_log import open_access_log
from remote_rm.service.app import create_app
from remote_rm.service.judge import DEFAULT_LIMITS, Judge, ServiceLimits
from remote_rm.service.serving_arguments import MIB
from remote_rm.verifier import Verifier

GRACE_SECONDS = 5
"""How much longer than the items at hand can take the server waits for open requests when it is told to stop."""

KEEP_ALIVE_SECONDS = 60
"""Longer than aiohttp's clients keep an idle connection, so that none is closed in the moment of its reuse."""


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """Where a service listens and what it takes on; the defaults stand at the flags in `serving_arguments`."""

    host: str
    port: int
    port_file: Path | None
    limits: ServiceLimits
    token_env: str | None
    access_log: Path | None
    log_sample_share: float

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "ListeningOptions":
        """Read the flags of `add_listening_arguments`."""
        return cls(**_listening(args, worker_memory_bytes=DEFAULT_LIMITS.worker_memory_bytes))


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ListeningOptions):
    """Where and how a verifier's service runs."""

    workers: int
    item_timeout_seconds: float

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "ServingOptions":
        """Read the flags of `add_serving_arguments`."""
        return cls(
            **_listening(args, worker_memory_bytes=args.worker_memory_mib * MIB),
            workers=args.workers,
            item_timeout_seconds=args.item_timeout_seconds,
        )


def _listening(args: argparse.Namespace, *, worker_memory_bytes: int) -> dict[str, Any]:
    return {
        "host": args.host,
        "port": args.port,
        "port_file": args.port_file,
        "limits": ServiceLimits(
            max_queued_items=args.max_queued_items,
            max_request_bytes=ceil(args.max_request_mib * MIB),
            worker_memory_bytes=worker_memory_bytes,
        ),
        "token_env": args.token_env,
        "access_log": args.access_log,
        "log_sample_share": args.log_sample_share,
    }


class AnnouncingServer(uvicorn.Server):
    """A uvicorn server that says where it listens, once it does, and that finishes what it has before it stops."""

    def __init__(self, config: uvicorn.Config, *, judge: Judge, url: str, port: int, port_file: Path | None) -> None:
        super().__init__(config)
        self._judge = judge
        self._url = url
        self._port = port
        self._port_file = port_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and the listener, then print the line that scripts wait for."""
        await super().startup(sockets=sockets)
        if not self.started:
            return
        if self._port_file is not None:
            write_atomically(self._port_file, text=f"{self._port}\n")
        sys.stdout.write(f"reward server: {self._url}\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests and answer the open ones; a second signal ends it at once."""
        self.config.timeout_graceful_shutdown = ceil(self._judge.most_seconds_left()) + GRACE_SECONDS
        await super().shutdown(sockets=sockets)


def serve(verifier: Verifier, *, options: ServingOptions) -> None:
    """Serve a verifier until SIGINT or SIGTERM; exits with code 1 and one sentence if it cannot listen or start."""

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


def serve_app(make_app: Callable[[str | None], FastAPI], *, options: ListeningOptions) -> None:
    """Serve an application of `create_service` until SIGINT or SIGTERM; exits with code 1 if it cannot listen or start.

    Args:
        make_app: (token) -> application; called once the address is had, since it may take long.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = _token(options.token_env)
    _open_access_log(options.access_log)
    listener = bind(options.host, port=options.port)
    try:
        if options.port_file is not None:
            _clear(options.port_file)
        app = make_app(token)
        server = _server(app, options=options, port=listener.getsockname()[1])
        # uvicorn stops gracefully and then raises the signal again: end by exiting, so that temporary files are removed.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        server.run(sockets=[listener])
    finally:
        listener.close()
    if not server.started:
        sys.exit(1)


def _server(app: FastAPI, *, options: ListeningOptions, port: int) -> AnnouncingServer:
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_SECONDS)
    url = f"http://{_reachable_host(options.host)}:{port}/get_reward"
    return AnnouncingServer(config, judge=app.state.judge, url=url, port=port, port_file=options.port_file)


def bind(host: str, *, port: int) -> socket.socket:
    """Return a bound socket; exits with code 1 and one sentence where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        sys.exit(
            f"reward server: error: --host {host} is no address of this machine ({error}); choose another, "
            "such as 127.0.0.1"
        )
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        sys.exit(
            f"reward server: error: cannot listen on {host}:{port} ({error.strerror}); "
            "stop what uses that port, choose another --port, or let --port 0 pick a free one"
        )
    return listener


def _token(name: str | None) -> str | None:
    """The token in an environment variable; exits with code 1 and one sentence where it holds none."""
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token:
        sys.exit(
            f"reward server: error: --token-env {name}: the environment variable {name} is not set; "
            f"export it, for example {name}=$(openssl rand -hex 16), or leave the flag out"
        )
    return token


def _open_access_log(file: Path | None) -> None:
    try:
        open_access_log(file)
    except OSError as error:
        sys.exit(
            f"reward server: error: --access-log {file} cannot be written ({error.strerror}); choose another place"
        )


def _clear(port_file: Path) -> None:
    """Remove the file of an earlier server; exits with code 1 and one sentence where none can be written."""
    try:
        port_file.parent.mkdir(parents=True, exist_ok=True)
        port_file.unlink(missing_ok=True)
    except OSError as error:
        sys.exit(
            f"reward server: error: --port-file {port_file} cannot be written ({error.strerror}); choose another place"
        )


def write_atomically(path: Path, *, text: str) -> None:
    """Write a file so that a reader sees all of it or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _reachable_host(host: str) -> str:
    """The host to put into a URL: the wildcard address is reached through the loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
