"""A judge on this machine, in the event loop of the test: it answers as the test says, and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, as a judge that keeps to its instructions reads it."""

    number: int
    """From 0, in the order of arrival."""
    body: dict[str, Any]
    code: str
    question: str
    reference: str
    answer: str

    @property
    def user(self) -> str:
        """The whole message of the user."""
        return self.body["messages"][1]["content"]

    def verdict(self, word: str) -> str:
        """A well-formed verdict."""
        return json.dumps({"code": self.code, "verdict": word})

    @property
    def fair(self) -> str:
        """Right where the answer is the reference but for case."""
        return self.verdict("right" if self.answer.lower() == self.reference.lower() else "wrong")


def asked_of(body: dict[str, Any], *, number: int = 0) -> Asked:
    """Read a request; fails where its data are not one line between the lines of its code."""
    opening, begin, line, end, _ = body["messages"][1]["content"].split("\n")
    code = opening.removeprefix("The code is ").removesuffix(".")
    assert (begin, end) == (f"BEGIN DATA {code}", f"END DATA {code}")
    return Asked(number=number, body=body, code=code, **json.loads(line))


def completion(text: str, *, tokens: int | None = 60) -> web.Response:
    """A reply of the model."""
    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}], **usage})


def failure(status: int, message: str = "busy", **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


Answer = Callable[[Asked], Awaitable["str | web.Response"]]


class JudgeServer:
    """Serves from `async with` to the end of the block."""

    def __init__(self, answer: Answer, *, models_status: int = 200) -> None:
        self._answer = answer
        self._models_status = models_status
        self.asked: list[Asked] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def __aenter__(self) -> JudgeServer:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)])
        # A client that gives up is noticed.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        asked = asked_of(await request.json(), number=len(self.asked))
        self.asked.append(asked)
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = await self._answer(asked)
        finally:
            self.at_once -= 1
        return completion(said) if isinstance(said, str) else said

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"error": {"message": f"no {self.keys[-1]}"}}, status=self._models_status)


async def fair(asked: Asked) -> str:
    """What a judge that keeps to its instructions answers."""
    return asked.fair
