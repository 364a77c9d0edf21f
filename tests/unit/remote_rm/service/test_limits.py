"""Limits of connections, heads and bodies, over real sockets, with both of uvicorn's protocols."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from fastapi import FastAPI
from helpers.http_servers import in_a_loop
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from remote_rm.math_verifier import MathVerifier
from remote_rm.service import server
from remote_rm.service.app import create_app
from remote_rm.service.server import MAX_HEAD_BYTES, guarded_protocol
from remote_rm.verifier import ServiceLimits

RIGHT = {"query": ["q"], "prompts": ["p"], "labels": ["4"], "responses": ["<answer>4</answer>"]}
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
def protocol(request: pytest.FixtureRequest) -> type[asyncio.Protocol]:
    return request.param


@contextlib.asynccontextmanager
async def served(protocol: type[asyncio.Protocol], **limits: float) -> AsyncIterator[tuple[Connect, FastAPI]]:
    """An application whose workers are not started, since nothing here needs one."""
    those = ServiceLimits(**limits)
    app = create_app(MathVerifier(), workers=1, item_timeout_seconds=1.0, limits=those)
    guarded = guarded_protocol(max_connections=those.max_connections, head_seconds=those.head_seconds, base=protocol)
    config = uvicorn.Config(
        app, http=guarded, ws="none", lifespan="off", log_config=None, h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server._serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            return reader, writer

        try:
            yield connect, app
        finally:
            for writer in opened:
                writer.close()
            server.should_exit = True
            await serving


async def reply_of(reader: asyncio.StreamReader) -> tuple[int, str, dict]:
    """Status, head and body of one reply."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout=10)).decode().lower()
    length = re.search(r"content-length: (\d+)", head)
    body = await reader.readexactly(int(length[1]))
    return int(head.split()[1]), head, json.loads(body)


def post(body: bytes, *, length: int | None = None) -> bytes:
    head = f"POST /get_reward HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def is_closed(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), timeout=10) == b""


@in_a_loop
async def test_a_connection_too_many_is_refused_and_closed(protocol):
    async with served(protocol, max_connections=2) as (connect, _app):
        first, _ = await connect(), await connect()
        await asyncio.sleep(0.05)
        reader, _ = await connect()
        status, head, body = await reply_of(reader)
        assert (status, body["detail"]) == (503, "2 connections are open already; try again later")
        assert "retry-after: 1" in head
        assert await is_closed(reader)
        first[1].write(HEALTH)
        assert (await reply_of(first[0]))[0] == 200
        first[1].close()
        await asyncio.sleep(0.05)
        reader, writer = await connect()
        writer.write(HEALTH)
        assert (await reply_of(reader))[0] == 200


@in_a_loop
async def test_a_head_that_comes_slowly_ends_with_408_and_the_connection(protocol):
    async with served(protocol, head_seconds=0.3) as (connect, _app):
        silent, _ = await connect()
        reader, writer = await connect()
        # Also after a first request, and counted from the first byte of the second.
        writer.write(HEALTH)
        assert (await reply_of(reader))[0] == 200
        await asyncio.sleep(0.5)
        for part in (HEALTH[:10], HEALTH[10:15]):
            writer.write(part)
            await asyncio.sleep(0.1)
        assert (await reply_of(reader))[0] == 408
        assert await is_closed(reader)
        assert await is_closed(silent)


@in_a_loop
async def test_a_head_without_end_is_refused(protocol):
    async with served(protocol) as (connect, _app):
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\n")
        for number in range(64):
            writer.write(f"x-{number:02}: {'y' * 1000}\r\n".encode())
        await asyncio.sleep(0.2)
        # What it has not read when it closes would make the system drop its reply.
        writer.write(f"x-64: {'y' * 1000}\r\n".encode())
        assert (await reply_of(reader))[0] == 431


@in_a_loop
async def test_a_body_that_comes_slowly_ends_with_408_and_the_connection(protocol):
    async with served(protocol, body_seconds=0.3) as (connect, _app):
        reader, writer = await connect()
        body = json.dumps(RIGHT).encode()
        writer.write(post(body))
        assert (await reply_of(reader))[2]["scores"] == [1.0]
        await asyncio.sleep(0.4)
        writer.write(post(body[:5], length=len(body)))
        await asyncio.sleep(0.1)
        writer.write(body[5:8])
        status, head, told = await reply_of(reader)
        assert (status, told["detail"][:39]) == (408, "the body did not come in within 0.3 s; ")
        assert "connection: close" in head
        assert await is_closed(reader)


@in_a_loop
async def test_bodies_that_leave_no_room_for_others_are_refused(protocol):
    body = json.dumps(RIGHT | {"query": ["x" * 3000]}).encode()

    async with served(protocol, max_open_bytes=5000) as (connect, _app):
        first, writer = await connect()
        writer.write(post(body)[:-1])
        await asyncio.sleep(0.1)
        second, other = await connect()
        other.write(post(body))
        status, head, _ = await reply_of(second)
        assert status == 503
        assert "retry-after: 1" in head
        writer.write(body[-1:])
        assert (await reply_of(first))[0] == 200
        other.write(post(body))
        assert (await reply_of(second))[0] == 200


@in_a_loop
async def test_a_service_that_stops_refuses_bodies_that_are_still_coming_in(protocol):
    async with served(protocol) as (connect, app):
        reader, writer = await connect()
        writer.write(post(b'{"query"', length=100))
        await asyncio.sleep(0.1)
        app.state.refuse()
        status, head, body = await reply_of(reader)
        assert status == 503
        assert "the server is stopping" in body["detail"]
        assert await is_closed(reader)


def test_a_client_that_goes_away_while_it_sends_is_no_error(protocol, caplog):
    async def scenario() -> None:
        async with served(protocol) as (connect, _app):
            _, writer = await connect()
            writer.write(post(b'{"query"', length=100))
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("files", "room"), [(256, 128), (300, 150), (1024, 768), (1, 1), (100_000, 1000)])
def test_connections_fit_the_systems_limit_of_open_files(files, room, monkeypatch):
    monkeypatch.setattr(server.resource, "getrlimit", lambda kind: (files, files))
    monkeypatch.setattr(server.resource, "setrlimit", lambda kind, limits: None)
    assert server.connections_within(1000) == room
