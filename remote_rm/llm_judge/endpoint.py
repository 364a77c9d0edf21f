"""Requests to an OpenAI-compatible chat endpoint, what their failures mean, and the records of a judge on disk."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import tenacity

from remote_rm.verifier import NotReady

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge

KEY_ENV = "LLM_JUDGE_API_KEY"
"""The environment variable with the endpoint's key, unless a flag names another."""
LONGEST_REASON = 300


class RequestFailed(Exception):
    """A request has no usable reply; the message never holds the key."""

    def __init__(
        self, reason: str, *, again: bool = True, is_paid: bool = False, status: int = 0, wait_seconds: float = 0.0
    ) -> None:
        """Args:
        again: another request may succeed.
        is_paid: the model may have computed for it.
        wait_seconds: how long the server asks clients to wait.
        """
        super().__init__(reason)
        self.again, self.is_paid, self.status, self.wait_seconds = again, is_paid, status, wait_seconds


class ChatEndpoint:
    """Sends requests, each over its own connection, so that nothing is left open when the process ends."""

    def __init__(self, settings: LlmJudge) -> None:
        """Raise NotReady if no endpoint is given, or its key is not set."""
        if not settings.judge_url or not settings.judge_model:
            raise NotReady("the verifier llm_judge asks a server: give its --judge-url and the --judge-model there")
        variable = settings.judge_key_env
        self._key = os.environ.get(variable or KEY_ENV, "").strip()
        if variable is not None and not self._key:
            raise NotReady(f"--judge-key-env {variable}: this environment variable is not set or empty; export it")
        self._settings = settings
        self._base = settings.judge_url.rstrip("/")

    async def check(self) -> None:
        """Raise RequestFailed if the address does not answer within a request's time, or the key is refused."""
        try:
            await self._text("GET", "models")
        except RequestFailed as failure:
            # Not every server lists its models.
            if failure.status in (0, 401, 403):
                raise

    async def reply(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, int | None]:
        """Return what the model says, and the tokens that the server reports, if it does; raises RequestFailed."""
        own = json.loads(self._settings.judge_body)
        fields = {"model": self._settings.judge_model, "messages": messages, "temperature": 0.0, **own}
        body = {name: value for name, value in fields.items() if value is not None}
        text = await self._text("POST", "chat/completions", body)
        try:
            answer = json.loads(text)
            said, usage = str(answer["choices"][0]["message"]["content"]), answer.get("usage")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._failed(f"the reply is no chat completion: {text}", is_paid=True) from error
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        return said, tokens if isinstance(tokens, int) and 0 <= tokens < 2**40 else None

    async def _text(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        seconds = self._settings.judge_timeout_seconds
        session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=aiohttp.ClientTimeout(total=seconds),
            # The proxies that the environment names; what runs on this machine needs none.
            trust_env=urlsplit(self._base).hostname not in ("localhost", "127.0.0.1", "::1"),
        )
        # A redirect could send the key elsewhere.
        request = session.request(method, f"{self._base}/{path}", json=body, allow_redirects=False)
        try:
            async with session, request as answer:
                text = await answer.text(errors="replace")
        except asyncio.TimeoutError as error:
            raise self._failed(f"it cannot be asked: no answer within {seconds:g} s", is_paid=True) from error
        except aiohttp.ClientError as error:
            is_paid = not isinstance(error, aiohttp.ClientConnectorError)
            raise self._failed(f"it cannot be asked: {str(error) or type(error).__name__}", is_paid=is_paid) from error
        if (status := answer.status) == 200:
            return text
        wait = answer.headers.get("Retry-After", "").strip()
        wait_seconds, again = float(wait) if wait.isdecimal() else 0.0, status in (408, 429) or status >= 500
        raise self._failed(f"status {status}: {text}", again=again, status=status, wait_seconds=wait_seconds)

    def _failed(self, reason: str, **known: Any) -> RequestFailed:
        """The error, whose message is one short line without the key, which some servers repeat."""
        told = reason.replace(self._key, "***") if self._key else reason
        return RequestFailed(" ".join(told.split())[:LONGEST_REASON], **known)


DATABASE, DISAGREEMENTS = "verdicts.sqlite", "disagreements.jsonl"
MAX_DISAGREEMENT_BYTES = 64 * 2**20
"""From this size on, no further line is written."""
BUSY_SECONDS = 10.0
"""How long a statement waits for another process's."""
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, is_right INTEGER NOT NULL, judged_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spending (
    id INTEGER PRIMARY KEY CHECK (id = 1), requests INTEGER NOT NULL, tokens INTEGER NOT NULL
);
INSERT OR IGNORE INTO spending VALUES (1, 0, 0);
"""
"""The log keeps writes short, some 70 us each; verdicts that a power cut loses are requested again."""


class Ledger:
    """Verdicts, and what was spent by all who have used the folder; used in one thread.

    Its methods raise OSError or sqlite3.Error if the folder or its database cannot be used.
    """

    def __init__(self, folder: str | None, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        """Args:
        folder: created if it is missing; with None, everything stays in memory and disagreements are not kept.
        max_requests, max_tokens: the limits on spending; None is no limit.
        """
        self._folder = None if folder is None else Path(folder)
        self._limits = {"requests": max_requests, "tokens": max_tokens}
        self._connection: sqlite3.Connection | None = None

    def open(self) -> sqlite3.Connection:
        """Connect, unless that is done."""
        if self._connection is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._connection = _connected(":memory:" if self._folder is None else str(self._folder / DATABASE))
        return self._connection

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def verdict(self, key: str) -> bool | None:
        """Return the stored verdict of a key; None if there is none."""
        found = self.open().execute("SELECT is_right FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if found is None else bool(found[0])

    def keep(self, key: str, is_right: bool) -> None:
        """Keep a verdict; the first one by a key stays."""
        self.open().execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)", (key, is_right, time.time()))

    def reserve(self) -> bool:
        """Charge one request; return False, and charge nothing, if the budget is used up."""
        statement = (
            "UPDATE spending SET requests = requests + 1 WHERE "
            "(:requests IS NULL OR requests < :requests) AND (:tokens IS NULL OR tokens < :tokens)"
        )
        return self.open().execute(statement, self._limits).rowcount == 1

    def charge(self, requests: int, tokens: int) -> None:
        """Add to what was spent; a request that no model has computed for is taken back by -1."""
        self.open().execute("UPDATE spending SET requests = requests + ?, tokens = tokens + ?", (requests, tokens))

    def spending(self) -> tuple[int, int]:
        """Return how many requests and tokens were spent."""
        requests, tokens = self.open().execute("SELECT requests, tokens FROM spending").fetchone()
        return requests, tokens

    def disagree(self, record: Mapping[str, object]) -> None:
        """Append a record to the file of disagreements, unless that has reached its size."""
        if self._folder is None:
            return
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record}) + "\n"
        # One write in append mode: lines of several processes do not mix.
        with (self._folder / DISAGREEMENTS).open("ab", buffering=0) as file:
            if file.tell() + len(line) <= MAX_DISAGREEMENT_BYTES:
                file.write(line.encode())


# SQLite does not wait for the lock if two processes turn the log on at the same time.
@tenacity.retry(
    retry=tenacity.retry_if_exception(lambda error: str(error) == "database is locked"),
    stop=tenacity.stop_after_delay(BUSY_SECONDS),
    wait=tenacity.wait_random(0.01, 0.1),
    reraise=True,
)
def _connected(place: str) -> sqlite3.Connection:
    connection = sqlite3.connect(place, timeout=BUSY_SECONDS, isolation_level=None)
    connection.executescript(_SCHEMA)
    return connection
