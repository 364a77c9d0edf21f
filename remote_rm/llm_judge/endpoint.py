"""Requests to an OpenAI-compatible chat endpoint, what their failures mean, and the records of a judge on disk."""

from __future__ import annotations

import asyncio
import atexit
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timezone
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import tenacity

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge

RETRIED_STATUSES = frozenset((408, 429))
"""Besides 5xx: another attempt may not fail so."""
KEY_STATUSES = frozenset((401, 403))
LONGEST_REASON = 300
EXIT_SECONDS = 1.0


class TryAgain(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, reason: str, *, wait_seconds: float = 0.0, is_paid: bool) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        """How long the server asks clients to wait."""
        self.is_paid = is_paid
        """Whether the model may have computed for it."""


class Refused(Exception):
    """The endpoint will never answer such a request."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model said."""

    text: str
    tokens: int | None
    """Tokens of prompt and reply together; None if the server does not report them."""


class ChatEndpoint:
    """Asks for one reply at a time over pooled connections; belongs to the event loop that it is first used in."""

    def __init__(self, settings: LlmJudge, *, api_key: str | None) -> None:
        """Args:
        api_key: sent as a bearer token, and never written or shown.
        """
        self._settings = settings
        self._api_key = api_key
        self._base = settings.judge_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._at_exit: Callable[[], None] | None = None

    async def check(self) -> None:
        """Raise Refused if the address does not answer within a request's time, or the key is refused."""
        try:
            async with self._connected().get(f"{self._base}/models", allow_redirects=False) as reply:
                # Not every server lists its models; only a refused key counts.
                if reply.status in KEY_STATUSES:
                    raise Refused(f"{self._base} answers with {self._said(reply.status, await reply.text())}")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise Refused(f"{self._base} cannot be asked: {self._named(error)}") from error

    async def reply(self, messages: Sequence[Mapping[str, str]]) -> Reply:
        """Return the model's reply; raises TryAgain or Refused."""
        own = json.loads(self._settings.judge_body)
        body = {"model": self._settings.judge_model, "messages": messages, "temperature": 0.0, **own}
        sent = {name: value for name, value in body.items() if value is not None}
        url = f"{self._base}/chat/completions"
        try:
            # A redirect could send the key elsewhere.
            async with self._connected().post(url, json=sent, allow_redirects=False) as answer:
                text = await answer.text(errors="replace")
        except aiohttp.ClientConnectorError as error:
            raise TryAgain(self._named(error), is_paid=False) from error
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise TryAgain(self._named(error), is_paid=True) from error
        if answer.status in RETRIED_STATUSES or answer.status >= 500:
            wait_seconds = seconds_to_wait(answer.headers.get("Retry-After", ""))
            raise TryAgain(self._said(answer.status, text), wait_seconds=wait_seconds, is_paid=False)
        if answer.status != 200:
            raise Refused(f"{self._base} answers with {self._said(answer.status, text)}")
        return self._read(text)

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if session is not None:
            await session.close()

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = self._api_key
            self._session = aiohttp.ClientSession(
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=self._settings.judge_timeout_seconds),
                connector=aiohttp.TCPConnector(limit=self._settings.judge_concurrency),
                # The proxies that the environment names; what runs on this machine needs none.
                trust_env=urlsplit(self._base).hostname not in ("localhost", "127.0.0.1", "::1"),
            )
            self._at_exit = partial(_close_at_exit, self._session, asyncio.get_running_loop())
            atexit.register(self._at_exit)
        return self._session

    def _read(self, text: str) -> Reply:
        try:
            answer = json.loads(text)
            said = answer["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise TryAgain(f"the reply is no chat completion: {self._clean(text)}", is_paid=True) from error
        usage = answer.get("usage")
        return Reply(text=said if isinstance(said, str) else "", tokens=_total(usage))

    def _said(self, status: int, text: str) -> str:
        """The status and, if there is one, the server's message."""
        try:
            error = json.loads(text).get("error", text)
            words = str(error.get("message", text) if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            words = text
        words = self._clean(words)
        return f"status {status} ({words})" if words else f"status {status}"

    def _named(self, error: BaseException) -> str:
        if isinstance(error, asyncio.TimeoutError):
            return f"no answer within {self._settings.judge_timeout_seconds:g} s"
        return self._clean(str(error)) or type(error).__name__

    def _clean(self, text: str) -> str:
        """On one line, short, and without the key, which some servers repeat."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        text = " ".join(text.split())
        return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def _close_at_exit(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Close what a `BlockingPool` that is never stopped has open: aiohttp would complain of it on stderr."""
    if loop.is_running() and not session.closed:
        asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=EXIT_SECONDS)


def _total(usage: Any) -> int | None:
    """The tokens that a reply's `usage` reports, by their sum or by their parts."""
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(name) for name in ("total_tokens", "prompt_tokens", "completion_tokens")]
    total, *parts = [count if isinstance(count, int) and count >= 0 else None for count in counts]
    given = [part for part in parts if part is not None]
    return sum(given) if total is None and given else total


def seconds_to_wait(value: str) -> float:
    """Return the seconds of a `Retry-After` header, which may hold a date; 0.0 if it cannot be read."""
    if value.strip().isdecimal():
        return float(value)
    try:
        until = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return 0.0
    until = until if until.tzinfo is not None else until.replace(tzinfo=timezone.utc)
    return max(0.0, until.timestamp() - time.time())


DATABASE = "verdicts.sqlite"
DISAGREEMENTS = "disagreements.jsonl"
MAX_DISAGREEMENT_BYTES = 64 * 2**20
"""From this size on, no further line is written."""
BUSY_SECONDS = 30.0
"""How long a statement waits for another process's."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, is_right INTEGER NOT NULL, judged_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spending (
    id INTEGER PRIMARY KEY CHECK (id = 1), requests INTEGER NOT NULL, tokens INTEGER NOT NULL
);
INSERT OR IGNORE INTO spending VALUES (1, 0, 0);
"""
_WITHIN = "(:max_requests IS NULL OR requests < :max_requests) AND (:max_tokens IS NULL OR tokens < :max_tokens)"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits on spending; None is no limit."""

    max_requests: int | None
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What was spent by all who have used the folder."""

    requests: int
    tokens: int


class Ledger:
    """The records in one folder; opened, used and closed in one thread."""

    def __init__(self, folder: str | None, *, budget: Budget) -> None:
        """Args:
        folder: created if it is missing; with None, everything stays in memory and disagreements are not kept.
        """
        self._folder = None if folder is None else Path(folder)
        self.budget = budget
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Connect; raises OSError or sqlite3.Error if the folder or its database cannot be used."""
        self._database()

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def verdict(self, key: str) -> bool | None:
        """Return the stored verdict of a key; None if there is none."""
        found = self._database().execute("SELECT is_right FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if found is None else bool(found[0])

    def reserve(self) -> bool:
        """Charge one request, unless the budget is used up."""
        done = self._database().execute(
            f"UPDATE spending SET requests = requests + 1 WHERE {_WITHIN}", vars(self.budget)
        )
        return done.rowcount == 1

    def has_room(self) -> bool:
        """Return whether another request may be sent."""
        found = self._database().execute(f"SELECT 1 FROM spending WHERE {_WITHIN}", vars(self.budget))
        return found.fetchone() is not None

    def give_back(self) -> None:
        """Take back the charge of a request that no model has computed for."""
        self._database().execute("UPDATE spending SET requests = requests - 1")

    def charge(self, tokens: int) -> None:
        """Add what a reply has cost."""
        self._database().execute("UPDATE spending SET tokens = tokens + ?", (tokens,))

    def keep(self, key: str, is_right: bool) -> None:
        """Keep a verdict; the first one by a key stays."""
        self._database().execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)", (key, is_right, time.time()))

    def spending(self) -> Spending:
        """Return what was spent."""
        requests, tokens = self._database().execute("SELECT requests, tokens FROM spending").fetchone()
        return Spending(requests=requests, tokens=tokens)

    def disagree(self, record: Mapping[str, object]) -> None:
        """Append a record to the file of disagreements, unless that has reached its size; raises OSError."""
        if self._folder is None:
            return
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record}) + "\n"
        # One write in append mode: lines of several processes do not mix.
        with (self._folder / DISAGREEMENTS).open("ab", buffering=0) as file:
            if file.tell() + len(line) <= MAX_DISAGREEMENT_BYTES:
                file.write(line.encode())

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            place = ":memory:" if self._folder is None else str(self._folder / DATABASE)
            connection = sqlite3.connect(place, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                _prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


# SQLite does not wait for the lock if two processes turn the log on at the same time.
@tenacity.retry(
    retry=tenacity.retry_if_exception(_is_locked),
    stop=tenacity.stop_after_delay(BUSY_SECONDS),
    wait=tenacity.wait_random(0.01, 0.1),
    reraise=True,
)
def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    # Verdicts that a power cut loses are requested again.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(_SCHEMA)
