"""Limits of connections, heads and bodies, over real sockets."""

import argparse
import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from helpers.http_servers import in_a_loop

from remote_rm.math_verifier import MathVerifier
from remote_rm.service.access import RequestGuard
from remote_rm.service.app import HeadDeadline, _config, create_app

RIGHT = {"query": ["q"], "prompts": ["p"], "labels": ["4"], "responses": ["<answer>4</answer>"]}
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@contextlib.asynccontextmanager
async def served(*, max_connections: int = 10) -> AsyncIterator[Connect]:
    """An application whose workers are not started, since nothing here needs one."""
    app = create_app(MathVerifier(), workers=1, item_timeout_seconds=1.0)
    config = _config(app, argparse.Namespace(max_connections=max_connections, grace_seconds=1))
    config.lifespan = "off"
    running = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        serving = asyncio.create_task(running._serve([listener]))
        while not running.started:
            await asyncio.sleep(0.01)
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in opened:
                writer.close()
            running.should_exit = True
            await serving


async def reply_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one reply."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout=10)).decode().lower()
    length = re.search(r"content-length: (\d+)", head)
    return int(head.split()[1]), await reader.readexactly(int(length[1])) if length else b""


def post(body: bytes, *, length: int | None = None) -> bytes:
    head = f"POST /get_reward HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def is_closed(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), timeout=10) == b""


@in_a_loop
async def test_a_connection_too_many_is_refused():
    async with served(max_connections=3) as connect:
        first, _, (reader, writer) = await connect(), await connect(), await connect()
        writer.write(HEALTH)
        assert (await reply_of(reader))[0] == 503
        writer.close()
        await asyncio.sleep(0.1)
        first[1].write(HEALTH)
        assert (await reply_of(first[0]))[0] == 200


@in_a_loop
async def test_a_head_that_comes_slowly_or_not_at_all_ends_with_its_connection(monkeypatch):
    monkeypatch.setattr(HeadDeadline, "seconds", 0.3)
    async with served() as connect:
        silent, _ = await connect()
        reader, writer = await connect()
        # Also after a first request, and counted from the first byte of the second.
        writer.write(HEALTH)
        assert (await reply_of(reader))[0] == 200
        await asyncio.sleep(0.5)
        for part in (HEALTH[:10], HEALTH[10:15]):
            writer.write(part)
            await asyncio.sleep(0.1)
        assert await is_closed(reader)
        assert await is_closed(silent)


@in_a_loop
async def test_a_head_without_end_is_refused():
    async with served() as connect:
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\n")
        for number in range(65):
            writer.write(f"x-{number:02}: {'y' * 1000}\r\n".encode())
        assert (await asyncio.wait_for(reader.readline(), timeout=10)).split()[1] == b"400"


@in_a_loop
async def test_a_body_that_comes_slowly_ends_with_408_and_the_connection(monkeypatch):
    monkeypatch.setattr(RequestGuard, "body_seconds", 0.3)
    async with served() as connect:
        reader, writer = await connect()
        body = json.dumps(RIGHT).encode()
        writer.write(post(body))
        assert json.loads((await reply_of(reader))[1])["scores"] == [1.0]
        await asyncio.sleep(0.4)
        writer.write(post(body[:5], length=len(body)))
        await asyncio.sleep(0.1)
        writer.write(body[5:8])
        status, told = await reply_of(reader)
        assert (status, json.loads(told)["detail"][:39]) == (408, "the body did not come in within 0.3 s; ")
        assert await is_closed(reader)


@in_a_loop
async def test_a_body_too_large_is_refused_before_it_is_there_and_its_connection_goes_on():
    async with served() as connect:
        reader, writer = await connect()
        writer.write(post(b"x" * 1000, length=65 * 2**20))
        assert (await reply_of(reader))[0] == 413


def test_a_client_that_goes_away_while_it_sends_is_no_error(caplog):
    async def scenario() -> None:
        async with served() as connect:
            _, writer = await connect()
            writer.write(post(b'{"query"', length=100))
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_is_measured_whether_its_length_is_announced_or_not(announced):
    given: list[bytes] = []

    async def app(scope, receive, send) -> None:
        given.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def status_of(*parts: bytes) -> int:
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages[-1]["more_body"] = False
        statuses: list[int] = []

        async def receive() -> dict:
            return messages.pop(0) if messages else await asyncio.sleep(60)

        async def send(message: dict) -> None:
            statuses.append(message.get("status", 0))

        length = str(sum(map(len, parts))).encode()
        scope = {"type": "http", "path": "/", "headers": [(b"content-length", length)] if announced else []}
        await RequestGuard(app, token=None, max_bytes=10)(scope, receive, send)
        return statuses[0]

    assert asyncio.run(status_of(b"12345", b"67890")) == 200
    assert asyncio.run(status_of(b"12345", b"678901")) == 413
    assert given == [b"1234567890"]


@in_a_loop
async def test_the_work_for_a_client_that_has_gone_is_cancelled():
    ended: list[str] = []

    async def app(scope, receive, send) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict:
        return messages.pop(0)

    scope = {"type": "http", "path": "/", "headers": []}
    await asyncio.wait_for(RequestGuard(app, token=None, max_bytes=10)(scope, receive, None), timeout=10)
    assert ended == ["cancelled"]
