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
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from remote_rm.redaction import hidden_text, safe_message
from remote_rm.verifier import Score

FIRST_PAUSE_SECONDS = 0.2
"""The pause after a first failure, doubled with each further one, with jitter."""
MAX_PAUSE_SECONDS = 5.0


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """One server, and how it has been doing."""

    address: str
    failures: int = 0
    """In a row; 0 while it is well."""
    failed_at: float = float("-inf")
    asked_again_at: float = 0.0
    last_failure: str = ""
    is_ours: bool | None = None
    """Whether it is a server of this package; None until somebody has asked it."""

    @property
    def is_well(self) -> bool:
        """Whether the last thing heard of it was a reply."""
        return self.failures == 0


class EndpointRota:
    """Chooses endpoints; from the outcomes reported to it, it avoids servers that fail.

    Times are those of `time.monotonic`.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.endpoints = tuple(Endpoint(address=address) for address in addresses)
        self._turn = 0

    def take(self) -> Endpoint | None:
        """Return the endpoint to ask now, or None while all of them rest.

        One that failed is handed out once per pause: whether it is back is found out by one request, not by all.
        """
        in_turn = [*self.endpoints[self._turn :], *self.endpoints[: self._turn]]
        now = time.monotonic()
        due = (endpoint for endpoint in in_turn if not endpoint.is_well and endpoint.asked_again_at <= now)
        well = (endpoint for endpoint in in_turn if endpoint.is_well)
        chosen = next(due, None) or next(well, None)
        if chosen is not None:
            self._turn = (self.endpoints.index(chosen) + 1) % len(self.endpoints)
            if not chosen.is_well:
                chosen.asked_again_at = now + _pause(chosen.failures)
        return chosen

    def seconds_to_wait(self) -> float:
        """How long until `take` has one to give, unless a reply comes first."""
        return max(0.0, min(endpoint.asked_again_at for endpoint in self.endpoints) - time.monotonic())

    def succeeded(self, endpoint: Endpoint) -> None:
        """Note a reply."""
        endpoint.failures = 0

    def failed(self, endpoint: Endpoint, *, asked_at: float, reason: str, retry_after_seconds: float = 0.0) -> None:
        """Note a failure; those of requests that were under way together count once.

        Args:
            asked_at: when the request was sent.
            retry_after_seconds: the least pause, as the server asked for.
        """
        now = time.monotonic()
        if asked_at >= endpoint.failed_at:
            endpoint.failures += 1
            endpoint.failed_at = now
            endpoint.asked_again_at = now + _pause(endpoint.failures)
        endpoint.last_failure = reason
        endpoint.asked_again_at = max(endpoint.asked_again_at, now + retry_after_seconds)


def _pause(failures: int) -> float:
    longest = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)


logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECONDS = 5.0
LIFE_TIMEOUT_SECONDS = 2.0
"""How long /health of a server that failed may take to answer."""
LOOK_AGAIN_SECONDS = 0.2
"""How often a request that waits for all servers to come back looks whether another request has found one."""
TOKEN_ENV = "REMOTE_RM_TOKEN"
"""The environment variable with the token that is sent to every endpoint."""
SCALES = "image_scales"
"""The key that only servers of this package are sent: others may refuse what OpenRLHF does not send."""
UNUSABLE_REPLIES = 2
"""How many replies without a usable reward a request takes from each endpoint."""
LONGEST_REPLY_BYTES = 64 * 2**20
RETRIED_STATUSES = frozenset((408, 429))
"""Besides 5xx: the server, not the request, is at fault."""
START_HINT = (
    "start one with `python -m remote_rm.math_verifier --port PORT` and give its address, ending in /get_reward"
)


class RewardUnavailable(RuntimeError):
    """No reward could be had; the message names the endpoint, without its secrets, the cause, and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(safe_message(reason))


class RewardRefused(RewardUnavailable):
    """A server reports that samples cannot be judged; it and others may judge later ones."""


class UnusableReply(RewardUnavailable):
    """A server answered with something else than rewards; it may do better at the next attempt, or another one may."""


class _TryAgain(Exception):
    """A failure that another attempt, or another endpoint, may not have."""

    def __init__(self, reason: str, *, retry_after_seconds: float = 0.0, is_timeout: bool = False) -> None:
        super().__init__(safe_message(reason))
        self.retry_after_seconds = retry_after_seconds
        self.is_timeout = is_timeout


class _TooLarge(Exception):
    """A request that the server would take in parts."""

    def __init__(self, reason: str, *, most: int | None) -> None:
        super().__init__(reason)
        self.most = most
        """How many samples the server takes at once; None if it does not report that."""


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
        self._most_items: int | None = None
        self._rota = EndpointRota(self.endpoints)
        token = token or os.environ.get(TOKEN_ENV, "").strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(connections)

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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

        Connection errors, time-outs and 5xx replies are tried again until the deadline, elsewhere at once, at the same
        server after a pause, or after what its Retry-After says. A reply without a usable reward is final when each
        endpoint gave two. 422 is final: the data are at fault. Other 4xx replies are final when each endpoint gave one.
        """
        (score,) = await self.reward_batch(
            [SentSample(query=query, prompt=prompt, label=label, response=response, further=further or {})]
        )
        return score

    async def reward_batch(self, samples: Sequence[SentSample]) -> list[Score]:
        """Return the rewards of samples, in their order, asked for in as few requests as the servers take.

        Either all samples have a response or none has. Raises RewardUnavailable as `reward` does, for all of them
        together; the requests of a batch that failed or was cancelled are cancelled, which servers notice.
        """
        most = len(samples) if self._most_items is None else min(len(samples), self._most_items)
        parts = [samples[start : start + most] for start in range(0, len(samples), max(1, most))]
        if len(parts) == 1:
            return await self._reward_part(parts[0])
        asking = [asyncio.ensure_future(self._reward_part(part)) for part in parts]
        try:
            return [score for scores in await asyncio.gather(*asking) for score in scores]
        finally:
            for task in asking:
                task.cancel()

    async def _reward_part(self, samples: Sequence[SentSample]) -> list[Score]:
        session = self._session_here()
        try:
            async with self._slots:
                return await self._with_retries(session, _payload(samples))
        except _TooLarge as refusal:
            if len(samples) == 1:
                raise RewardRefused(f"{refusal}; {_advice(413)}") from refusal
            if refusal.most is None:
                half = len(samples) // 2
                return [*await self.reward_batch(samples[:half]), *await self.reward_batch(samples[half:])]
            self._most_items = min(refusal.most, len(samples) - 1)
            return await self.reward_batch(samples)

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

    async def _with_retries(self, session: aiohttp.ClientSession, payload: dict[str, list[Any]]) -> list[Score]:
        started, attempts, timeout_s = time.monotonic(), 0, self._timeout_s
        refusals = 0.0  # in those that an endpoint may give
        while (remaining := self._deadline_s - (time.monotonic() - started)) > 0:
            endpoint = self._rota.take()
            if endpoint is None:
                await asyncio.sleep(min(self._rota.seconds_to_wait(), LOOK_AGAIN_SECONDS, remaining))
                continue
            attempts += 1
            asked_at = time.monotonic()
            try:
                life_timeout_s = min(LIFE_TIMEOUT_SECONDS, remaining)
                if not endpoint.is_well:
                    await _health(session, endpoint, timeout_s=life_timeout_s)
                if SCALES in payload and endpoint.is_ours is None:
                    endpoint.is_ours = _is_health(await _health(session, endpoint, timeout_s=life_timeout_s))
                sent = payload if endpoint.is_ours else {key: payload[key] for key in payload if key != SCALES}
                scores = await _request_once(session, endpoint.address, sent, timeout_s=min(timeout_s, remaining))
            except _TryAgain as failure:
                if failure.is_timeout:
                    # A server drops an aborted request: with the same time limit it might never finish.
                    timeout_s *= 2
                logger.warning("%s; trying again", failure)
                self._rota.failed(
                    endpoint, asked_at=asked_at, reason=str(failure), retry_after_seconds=failure.retry_after_seconds
                )
            except (RewardRefused, _TooLarge):
                # A reply that is final is a reply: the server is up.
                self._rota.succeeded(endpoint)
                raise
            except RewardUnavailable as failure:
                refusals += 1 / UNUSABLE_REPLIES if isinstance(failure, UnusableReply) else 1
                if refusals >= len(self.endpoints):
                    raise
                logger.warning("%s; trying again", failure)
                self._rota.failed(endpoint, asked_at=asked_at, reason=str(failure))
            else:
                self._rota.succeeded(endpoint)
                return scores
        failures = "; ".join(dict.fromkeys(end.last_failure for end in self._rota.endpoints if end.last_failure))
        raise RewardUnavailable(
            f"{failures}; gave up after {attempts} attempts in {time.monotonic() - started:.1f} s "
            f"over {', '.join(self.endpoints)}; check that the reward server runs and is reachable, or {START_HINT}"
        )


async def _request_once(
    session: aiohttp.ClientSession, endpoint: str, payload: dict[str, list[Any]], *, timeout_s: float
) -> list[Score]:
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.post(endpoint, json=payload, timeout=timeout) as reply:
            body = await _text(reply, endpoint=endpoint)
            status = reply.status
            retry_after = reply.headers.get("Retry-After", "")
    except asyncio.TimeoutError as error:
        raise _TryAgain(f"{endpoint} did not answer within {timeout_s:.1f} s", is_timeout=True) from error
    except aiohttp.ClientError as error:
        raise _TryAgain(f"{endpoint} failed with {type(error).__name__}: {error}") from error
    if (status >= 500 and status != 501) or status in RETRIED_STATUSES:
        seconds = float(retry_after) if retry_after.isdecimal() else 0.0
        raise _TryAgain(f"{endpoint} answered {status}: {_detail(body)}", retry_after_seconds=seconds)
    if status == 413:
        most = (_json_object(body) or {}).get("max_request_items")
        told = f"{endpoint} refused the request with 413: {_detail(body)}"
        raise _TooLarge(told, most=most if isinstance(most, int) and most > 0 else None)
    if status != 200:
        failure = RewardRefused if status == 422 else RewardUnavailable
        raise failure(f"{endpoint} refused the request with {status}: {_detail(body)}; {_advice(status)}")
    return parse_replies(body, count=len(payload["query"]), endpoint=endpoint)


async def _text(reply: aiohttp.ClientResponse, *, endpoint: str) -> str:
    """Return the text of a reply, in which U+FFFD replaces bytes that are not UTF-8; raises UnusableReply for one too long."""
    body = bytearray()
    async for chunk in reply.content.iter_chunked(2**16):
        body += chunk
        if len(body) > LONGEST_REPLY_BYTES:
            raise UnusableReply(
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
        raise UnusableReply(
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


async def _health(session: aiohttp.ClientSession, endpoint: Endpoint, *, timeout_s: float) -> str:
    """Return a server's /health; raises _TryAgain if it is not up, which this shows faster than a reward request."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(_health_address(endpoint.address), timeout=timeout) as reply:
            status, body = reply.status, await _text(reply, endpoint=endpoint.address)
    except asyncio.TimeoutError as error:
        raise _TryAgain(f"{endpoint.address} did not answer within {timeout_s:.1f} s") from error
    except aiohttp.ClientError as error:
        raise _TryAgain(f"{endpoint.address} failed with {type(error).__name__}: {error}") from error
    if status >= 500 and status != 501:
        raise _TryAgain(f"{endpoint.address} answered {status} at /health")
    return body


async def _check_endpoint(session: aiohttp.ClientSession, endpoint: str) -> None:
    """Ask /health; a server without one is sent an empty request, which only a reward server understands."""
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_SECONDS)
    try:
        async with session.get(_health_address(endpoint), timeout=timeout) as reply:
            if reply.status == 200 and _is_health(await _text(reply, endpoint=endpoint)):
                return
        empty: dict[str, list[str]] = {"query": [], "prompts": [], "labels": []}
        async with session.post(endpoint, json=empty, timeout=timeout) as reply:
            if _understood(status=reply.status, body=await _text(reply, endpoint=endpoint)):
                return
            status = reply.status
    except asyncio.TimeoutError as error:
        raise RewardUnavailable(
            f"{endpoint} does not answer within {HEALTH_TIMEOUT_SECONDS:g} s: check the address, or {START_HINT}"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise RewardUnavailable(f"no reward server listens at {endpoint} ({error.os_error}): {START_HINT}") from error
    except aiohttp.ClientError as error:
        raise RewardUnavailable(
            f"{endpoint} is no reward server ({type(error).__name__}: {error}): {START_HINT}"
        ) from error
    raise RewardUnavailable(
        f"{endpoint} is no reward server: something else listens there and answered {status}; "
        f"check the port and the path, or {START_HINT}"
    )


def _health_address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/").rpartition("/")[0] + "/health", query=""))


def _is_health(body: str) -> bool:
    reply = _json_object(body)
    return reply is not None and reply.get("status") == "ok" and "verifier" in reply


def _understood(*, status: int, body: str) -> bool:
    reply = _json_object(body)
    return reply is not None and (status in (400, 422) or (status == 200 and "rewards" in reply))


def _json_object(body: str) -> Mapping[str, object] | None:
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) else None


def _detail(body: str) -> str:
    """The reason in a FastAPI error, without the request that it echoes."""
    reply = _json_object(body)
    detail = body.strip() if reply is None or "detail" not in reply else reply["detail"]
    if isinstance(detail, list):
        detail = "; ".join(str(entry["msg"]) for entry in detail if isinstance(entry, dict) and "msg" in entry)
    return " ".join(str(detail).split())[:300]


def _advice(status: int) -> str:
    if status in (401, 403):
        return f"put the server's token into the environment variable {TOKEN_ENV} of this process"
    if status in (404, 405, 501):
        return f"check the port and the path, or {START_HINT}"
    return "the request itself is at fault, so correct the data or the client; trying again would not help"
