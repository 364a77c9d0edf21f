"""HTTP servers in the place of a chat endpoint and the Hub, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
from aiohttp import web

from lmm_r1 import hub

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


@dataclass(kw_only=True)
class Uploads:
    """What a hub was asked."""

    posts: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def made(self) -> dict[str, object]:
        """The repository that was asked for first."""
        path, body = self.posts[0]
        assert path == "/api/repos/create"
        return json.loads(body)

    @property
    def files(self) -> list[str]:
        """The files of the last commit."""
        path, lines = self.posts[-1]
        assert path.startswith("/api/models/")
        assert path.endswith("/commit/main")
        return [json.loads(line)["value"].get("path") for line in lines.splitlines()][1:]


@contextmanager
def hub_server(*, token: str | None = "hf_token") -> Iterator[Uploads]:
    """A hub that takes everything, which the libraries of this process take for the real one."""
    uploads = Uploads()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer({})

        def do_GET(self) -> None:
            self._answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            uploads.posts.append((self.path, body))
            address = f"http://127.0.0.1:{self.server.server_port}/me/model"
            if self.path.endswith("/preupload/main"):
                files = [
                    {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
                ]
                self._answer({"files": files})
            else:
                self._answer({"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1", "id": "me/model"})

        def _answer(self, record: dict[str, object]) -> None:
            content = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server, pytest.MonkeyPatch.context() as patch:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        patch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub, "get_token", lambda: token)
        if token is not None:
            patch.setenv("HF_TOKEN", token)
        hub.is_reachable.cache_clear()
        try:
            yield uploads
        finally:
            server.shutdown()
            hub.is_reachable.cache_clear()


def in_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        asyncio.run(test(*args, **fixtures))

    return run
