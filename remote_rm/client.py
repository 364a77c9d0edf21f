"""Asks reward servers over HTTP with one pooled session; if one fails, others, and then an error: no reward is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from remote_rm.redaction import hidden_text, safe_message
from remote_rm.verifier import Score

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
"""The pause after a first failure, doubled with each further one, with jitter."""
MAX_PAUSE_SECONDS = 5.0
HEALTH_TIMEOUT_SECONDS = 5.0
TOKEN_ENV = "REMOTE_RM_TOKEN"
"""The environment variable with the token that is sent to every endpoint."""
LONGEST_REPLY_BYTES = 64 * 2**20
START_HINT = (
    "start one with `python -m remote_rm.math_verifier --port PORT` and give its address, ending in /get_reward"
)


class RewardUnavailable(RuntimeError):
    """No reward could be had; the message names the endpoint, without its secrets, the cause, and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(safe_message(reason))


class RewardRefused(RewardUnavailable):
    """A server reports that samples cannot be judged; it and others may judge later ones."""


class _TryAgain(Exception):
    """A failure that another attempt, or another endpoint, may not have."""

    def __init__(self, reason: str, *, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class _TooLarge(Exception):
    """A request that the server may take in parts."""


@dataclass(frozen=True, kw_only=True)
class SentSample:
    """The request for one reward."""

    query: str
    """Prompt and response as decoded, special tokens included."""
    prompt: str
    label: str
    response: str | None = None
    """The response; without it the server extracts it from the query."""
    further: Mapping[str, object] = field(default_factory=dict)
    """Further fields, for servers that know them."""


@dataclass(kw_only=True, eq=False)
class _Endpoint:
    """One server, and how it has been doing; times are those of `time.monotonic`."""

    address: str
    failures: int = 0
    """In a row; 0 while it is well."""
    failed_at: float = 0.0
    rests_until: float = 0.0
    last_failure: str = ""

    def fail(self, reason: str, *, asked_at: float, seconds: float = 0.0) -> None:
        """Let it rest, for at least so many seconds; failures of requests that were under way together count once."""
        now = time.monotonic()
        if asked_at >= self.failed_at:
            self.failures += 1
            self.failed_at = now
            longest = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self.failures - 1, 10))
            self.rests_until = now + longest * random.uniform(0.5, 1.0)
        self.rests_until = max(self.rests_until, now + seconds)
        self.last_failure = safe_message(reason)
        logger.warning("%s; trying again", self.last_failure)


class RewardClient:
    """Client of one or more reward servers that speak OpenRLHF's protocol; requests rotate over those that are well.

    Bound to no event loop until the first request, so it may be built before the loop of a Ray actor runs.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_s: float = 60.0,
        deadline_s: float = 180.0,
        connections: int = 64,
        token: str | None = None,
    ) -> None:
        """Make a client.

        Args:
            endpoints: Addresses such as http://127.0.0.1:5000/get_reward.
            timeout_s: Seconds that one attempt may take.
            deadline_s: Seconds after which a request is given up, over all attempts; waiting for a free
                connection does not count.
            connections: Requests under way at once; further ones wait.
            token: The bearer token for all endpoints; None takes what the environment variable REMOTE_RM_TOKEN holds.
        """
        if isinstance(endpoints, str) or not endpoints:
            raise ValueError(f"endpoints must be a list of at least one address, got {endpoints!r}")
        for endpoint in endpoints:
            if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
                raise ValueError(
                    f"{hidden_text(repr(endpoint))} is no address of a reward server: expected http://HOST:PORT/get_reward"
                )
        if timeout_s <= 0 or deadline_s <= 0 or connections < 1:
            raise ValueError(
                "timeout_s and deadline_s must be above 0 and connections at least 1, "
                f"got {timeout_s}, {deadline_s} and {connections}"
            )
        self.endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._connections = connections
        self._servers = [_Endpoint(address=address) for address in endpoints]
        token = token or os.environ.get(TOKEN_ENV, "").strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(connections)

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    async def reward(
        self,
        *,
        query: str,
        prompt: str,
        label: str,
        response: str | None = None,
        further: Mapping[str, object] | None = None,
    ) -> Score:
        """Return the reward of one sample; raises RewardUnavailable when none can be had.

        `further` is sent under its own keys, as lists of one, for servers that know them.

        Connection errors, time-outs, 408, 429 and 5xx replies are tried again until the deadline, elsewhere at once, at
        the same server after a pause, or after what its Retry-After says. 422 is final: the data are at fault. Other 4xx
        replies, and replies without a usable reward, are final when each endpoint gave one.
        """
        (score,) = await self.reward_batch(
            [SentSample(query=query, prompt=prompt, label=label, response=response, further=further or {})]
        )
        return score

    async def reward_batch(self, samples: Sequence[SentSample]) -> list[Score]:
        """Return the rewards of samples, in their order; a batch that the server finds too large is sent in halves.

        Either all samples have a response or none has. Raises RewardUnavailable as `reward` does, for all of them
        together; if the call is cancelled, its requests are closed, which servers notice.
        """
        if not samples:
            return []
        session = self._session_here()
        try:
            async with self._slots:
                return await self._with_retries(session, _payload(samples))
        except _TooLarge as refusal:
            if len(samples) == 1:
                raise RewardRefused(f"{refusal}; {_advice(413)}") from refusal
            half = len(samples) // 2
            return [*await self.reward_batch(samples[:half]), *await self.reward_batch(samples[half:])]

    async def check_health(self) -> None:
        """Raise RewardUnavailable, within seconds, unless a reward server answers at every endpoint."""
        session = self._session_here()
        await asyncio.gather(*(_check_endpoint(session, endpoint) for endpoint in self.endpoints))

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _session_here(self) -> aiohttp.ClientSession:
        """The session of the running loop; sessions and semaphores belong to the loop they are first used in."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self._connections)
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    def _take(self) -> _Endpoint | None:
        """Return the server whose turn it is, or None while all of them rest."""
        now = time.monotonic()
        chosen = next((server for server in self._servers if server.rests_until <= now), None)
        if chosen is not None:
            self._servers.remove(chosen)
            self._servers.append(chosen)
            if chosen.failures:
                # Whether it is back is found out by one request, not by all.
                chosen.rests_until = now + self._timeout_s
        return chosen

    async def _with_retries(self, session: aiohttp.ClientSession, payload: dict[str, list[Any]]) -> list[Score]:
        started, attempts, timeout_s = time.monotonic(), 0, self._timeout_s
        refused: set[str] = set()
        while (remaining := started + self._deadline_s - time.monotonic()) > 0:
            server = self._take()
            if server is None:
                # Another request may find that one is back.
                await asyncio.sleep(min(FIRST_PAUSE_SECONDS, remaining))
                continue
            attempts += 1
            asked_at, seconds = time.monotonic(), min(timeout_s, remaining)
            try:
                scores = await _request_once(session, server.address, payload, timeout_s=seconds)
            except asyncio.TimeoutError:
                # A server drops an aborted request: with the same time limit it might never finish.
                timeout_s *= 2
                server.fail(f"{server.address} did not answer within {seconds:.1f} s", asked_at=asked_at)
            except aiohttp.ClientError as error:
                server.fail(f"{server.address} failed with {type(error).__name__}: {error}", asked_at=asked_at)
            except _TryAgain as failure:
                server.fail(str(failure), asked_at=asked_at, seconds=failure.retry_after_seconds)
            except (RewardRefused, _TooLarge):
                # A reply that is final is a reply: the server is up.
                server.failures, server.rests_until = 0, 0.0
                raise
            except RewardUnavailable as failure:
                refused.add(server.address)
                if len(refused) == len(self.endpoints):
                    raise
                server.fail(str(failure), asked_at=asked_at)
            else:
                server.failures, server.rests_until = 0, 0.0
                return scores
        failures = "; ".join(filter(None, dict.fromkeys(server.last_failure for server in self._servers)))
        raise RewardUnavailable(
            f"{failures}; gave up after {attempts} attempts in {time.monotonic() - started:.1f} s "
            f"over {', '.join(self.endpoints)}; check that the reward server runs and is reachable, or {START_HINT}"
        )


async def _request_once(
    session: aiohttp.ClientSession, endpoint: str, payload: dict[str, list[Any]], *, timeout_s: float
) -> list[Score]:
    async with session.post(endpoint, json=payload, timeout=aiohttp.ClientTimeout(total=timeout_s)) as reply:
        body, status = await _text(reply, endpoint=endpoint), reply.status
        retry_after = reply.headers.get("Retry-After", "")
    if (status >= 500 and status != 501) or status in (408, 429):
        # The server, not the request, is at fault.
        seconds = float(retry_after) if retry_after.isdecimal() else 0.0
        raise _TryAgain(f"{endpoint} answered {status}: {_detail(body)}", retry_after_seconds=seconds)
    if status == 413:
        raise _TooLarge(f"{endpoint} refused the request with 413: {_detail(body)}")
    if status != 200:
        failure = RewardRefused if status == 422 else RewardUnavailable
        raise failure(f"{endpoint} refused the request with {status}: {_detail(body)}; {_advice(status)}")
    return parse_replies(body, count=len(payload["query"]), endpoint=endpoint)


async def _text(reply: aiohttp.ClientResponse, *, endpoint: str) -> str:
    """Return the text of a reply, in which U+FFFD replaces bytes that are not UTF-8; raises RewardUnavailable if too long."""
    body = bytearray()
    async for chunk in reply.content.iter_chunked(2**16):
        body += chunk
        if len(body) > LONGEST_REPLY_BYTES:
            raise RewardUnavailable(
                f"{endpoint} sent a reply of more than {LONGEST_REPLY_BYTES // 2**20} MiB: {START_HINT}"
            )
    return body.decode("utf-8", errors="replace")


def parse_replies(body: str, *, count: int, endpoint: str) -> list[Score]:
    """Read the reply to a request of `count` samples, of which each list has one entry."""
    try:
        reply = json.loads(body)
        rewards = _scalars(reply["rewards"], count=count, name="rewards")
        scores = rewards if reply.get("scores") is None else _scalars(reply["scores"], count=count, name="scores")
        logs = {
            name: _scalars(value, count=count, name=f"extra_logs[{name!r}]")
            for name, value in (reply.get("extra_logs") or {}).items()
        }
        return [
            Score.of_reply(
                reward=rewards[place],
                score=scores[place],
                extra_logs={name: values[place] for name, values in logs.items()},
            )
            for place in range(count)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise RewardUnavailable(
            f"{endpoint} sent no usable reward ({type(error).__name__}: {error}) in {body[:200]!r}; "
            f"expected {{'rewards': [1.0], 'scores': [1.0], 'extra_logs': {{...}}}}: {START_HINT}"
        ) from error


def _payload(samples: Sequence[SentSample]) -> dict[str, list[Any]]:
    payload: dict[str, list[Any]] = {
        "query": [sample.query for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "labels": [sample.label for sample in samples],
    }
    responses = [sample.response for sample in samples if sample.response is not None]
    if responses and len(responses) < len(samples):
        raise ValueError(f"{len(responses)} of {len(samples)} samples have a response; give it for all or for none")
    names = dict.fromkeys(name for sample in samples for name in sample.further)
    further = {name: [sample.further[name] for sample in samples] for name in names}
    return payload | ({"responses": responses} if responses else {}) | further


def _scalars(value: Any, *, count: int, name: str) -> list[float]:
    if count == 1:
        return [_scalar(value, name=name)]
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{name} has not {count} values for {count} samples")
    return [_scalar(entry, name=f"{name}[{place}]") for place, entry in enumerate(value)]


def _scalar(value: Any, *, name: str) -> float:
    while isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"{name} has {len(value)} values for one sample")
        value = value[0]
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number


async def _check_endpoint(session: aiohttp.ClientSession, endpoint: str) -> None:
    """Ask /health; a server without one is sent an empty request, which only a reward server understands."""
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_SECONDS)
    parts = urlsplit(endpoint)
    health = urlunsplit(parts._replace(path=parts.path.rstrip("/").rpartition("/")[0] + "/health", query=""))
    try:
        async with session.get(health, timeout=timeout) as reply:
            told = _json_object(await _text(reply, endpoint=endpoint))
            if reply.status == 200 and told.get("status") == "ok" and "verifier" in told:
                return
        empty: dict[str, list[str]] = {"query": [], "prompts": [], "labels": []}
        async with session.post(endpoint, json=empty, timeout=timeout) as reply:
            told = _json_object(await _text(reply, endpoint=endpoint))
            status = reply.status
            if (told and status in (400, 422)) or (status == 200 and "rewards" in told):
                return
    except (asyncio.TimeoutError, aiohttp.ClientError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RewardUnavailable(
            f"no reward server listens at {endpoint} ({reason}): check the address, or {START_HINT}"
        ) from error
    raise RewardUnavailable(
        f"{endpoint} is no reward server: something else listens there and answered {status}; "
        f"check the port and the path, or {START_HINT}"
    )


def _json_object(body: str) -> Mapping[str, object]:
    """The JSON object, or an empty one for anything else."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) else {}


def _detail(body: str) -> str:
    """The reason in a FastAPI error, without the request that it echoes."""
    detail = _json_object(body).get("detail", body.strip())
    if isinstance(detail, list):
        detail = "; ".join(str(entry["msg"]) for entry in detail if isinstance(entry, dict) and "msg" in entry)
    return " ".join(str(detail).split())[:300]


def _advice(status: int) -> str:
    if status in (401, 403):
        return f"put the server's token into the environment variable {TOKEN_ENV} of this process"
    if status in (404, 405, 501):
        return f"check the port and the path, or {START_HINT}"
    return "the request itself is at fault, so correct the data or the client; trying again would not help"
