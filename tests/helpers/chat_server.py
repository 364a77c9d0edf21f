"""A server with the OpenAI chat API on this machine, in a thread: it answers as a test says and keeps what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], int], web.Response]


@dataclass
class ChatServer:
    """What came in, and where it listens."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the chat requests, in the order of their arrival."""
    keys: list[str | None] = field(default_factory=list)
    """The Authorization header of every request."""
    most_at_once: int = 0


def completion(*texts: str, finish_reason: str = "stop", tokens: int | None = 7) -> web.Response:
    """A reply with these responses."""
    choices = [
        {"index": place, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
        for place, text in enumerate(texts)
    ]
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return web.json_response({"choices": choices, **usage})


def failure(status: int, message: str, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@contextmanager
def chat_server(answer: Answer, *, seconds: float = 0.0, models_status: int = 200) -> Iterator[ChatServer]:
    """Serve on a free port until the block ends.

    Args:
        answer: gets a request's body and its number from 0.
        seconds: how long each answer takes.
    """
    server = ChatServer()
    at_once = 0

    async def chat(request: web.Request) -> web.Response:
        nonlocal at_once
        at_once += 1
        server.most_at_once = max(server.most_at_once, at_once)
        body = await request.json()
        number = len(server.requests)
        server.requests.append(body)
        server.keys.append(request.headers.get("Authorization"))
        await asyncio.sleep(seconds)
        at_once -= 1
        return answer(body, number)

    async def models(request: web.Request) -> web.Response:
        server.keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "m"}]}, status=models_status)

    async def serve() -> None:
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await ended.wait()
        await runner.cleanup()

    loop, ready = asyncio.new_event_loop(), threading.Event()
    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(timeout=10), "the server did not come up"
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(timeout=10)
        loop.close()
