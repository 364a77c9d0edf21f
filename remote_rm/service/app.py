"""The HTTP application, POST /get_reward in OpenRLHF's protocol and GET /health, and the process that serves it.

The server binds first, announces itself when it really listens, and stops gracefully.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from remote_rm.protocol import RewardReply, RewardRequest
from remote_rm.redaction import hide_in_logs
from remote_rm.registry import MIB
from remote_rm.reward_function import items_from
from remote_rm.service.access import HostGate, RequestGuard, check_access, is_local
from remote_rm.service.pool import judge_of
from remote_rm.verifier import (
    DEFAULT_LIMITS,
    WORKER_MEMORY_BYTES,
    AskingVerifier,
    Item,
    Judge,
    NotReady,
    PoolUnavailable,
    ServiceLimits,
    UnusableItem,
    Verifier,
    check_labels,
    extra_logs_of,
)

SERVICE_NAME = "lmm-r1 reward server"
DESCRIPTION = """Rewards for reinforcement learning, in the protocol of OpenRLHF's remote reward models.

A request holds parallel lists, one entry per sample; the reply holds as many numbers, in the same order. A response that
cannot be judged within the time limit scores 0 and is reported as `timed_out`; it never fails the request it came with.
"""


def create_app(
    verifier: Verifier,
    *,
    workers: int,
    item_timeout_seconds: float,
    worker_memory_bytes: int = WORKER_MEMORY_BYTES,
    limits: ServiceLimits = DEFAULT_LIMITS,
    token: str | None = None,
) -> FastAPI:
    """Return the application of a verifier, whose worker processes run from startup to shutdown; see `create_service`."""

    def items_of_request(request: RewardRequest) -> list[Item]:
        items = items_from(
            request.query,
            request.prompts,
            request.labels,
            responses=request.responses,
            image_scales=request.image_scales,
        )
        check_labels(items, verifier=verifier)
        return items

    judge = judge_of(
        verifier, workers=workers, item_timeout_seconds=item_timeout_seconds, worker_memory_bytes=worker_memory_bytes
    )
    return create_service(judge, items_of_request=items_of_request, limits=limits, token=token)


def create_service(
    judge: Judge,
    *,
    items_of_request: Callable[[RewardRequest], Sequence[Any]],
    limits: ServiceLimits,
    token: str | None,
) -> FastAPI:
    """Return the application around a judge, which runs from startup to shutdown.

    Args:
        items_of_request: what the judge is to judge, one item per sample; raises UnusableItem for a wrong request.
        token: what a request must bring as its bearer token; None asks for none.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await judge.start()
        try:
            yield
        finally:
            await judge.stop()

    app = FastAPI(title=SERVICE_NAME, description=DESCRIPTION, lifespan=lifespan)
    app.add_middleware(RequestGuard, token=token, max_bytes=limits.max_request_bytes)
    app.add_exception_handler(RequestValidationError, refuse_invalid)
    app.add_exception_handler(UnusableItem, lambda _request, error: refusal(422, str(error)))
    app.add_exception_handler(PoolUnavailable, lambda _request, error: refusal(503, str(error)))

    @app.post("/get_reward", summary="Judge samples", response_model=RewardReply)
    async def get_reward(request: RewardRequest) -> RewardReply | JSONResponse:
        """Judge every sample by what this service was started with."""
        if len(request.query) > limits.max_request_items:
            most = limits.max_request_items
            return refusal(413, f"a request may hold {most} samples; send the others in requests of their own")
        scores = await judge.judge(items_of_request(request))
        return RewardReply(
            rewards=[score.reward for score in scores],
            scores=[score.score for score in scores],
            extra_logs=extra_logs_of(scores),
        )

    @app.get("/health", summary="Is it up")
    async def health() -> dict[str, str | int]:
        """Answer as long as requests can be taken on, with what was judged so far; needs no token."""
        about: dict[str, str | int] = {"status": "ok", "service": SERVICE_NAME, "verifier": judge.name}
        return about | vars(judge.counts) | {"waiting": judge.waiting}

    return app


def refusal(status: int, detail: object) -> JSONResponse:
    """Return a reply without rewards, which says why."""
    return JSONResponse({"detail": detail}, status_code=status)


async def refuse_invalid(_request: Request, error: Exception) -> JSONResponse:
    """Describe what is wrong with a request (422), without sending it back: it may be large or not valid text."""
    assert isinstance(error, RequestValidationError)
    told = [{"loc": entry["loc"], "msg": entry["msg"], "type": entry["type"]} for entry in error.errors()[:20]]
    return refusal(422, told)


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
