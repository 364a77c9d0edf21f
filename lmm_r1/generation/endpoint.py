"""Generation by a chat endpoint: its messages, its requests, and the log of its answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import tenacity
from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart, check_asks, videos_of
from lmm_r1.data.sample import Completion, FinishReason
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, count_field, cut_torn_line, read_json_lines, text_field
from lmm_r1.generation.engine import Outcome, SamplingSettings

FINISH_REASONS: dict[object, FinishReason] = {"stop": "stop", "eos_token": "stop", "length": "length"}


def openai_messages(row: Row) -> list[dict[str, object]]:
    """Return a row's messages with its images as PNG data URLs: the pixels that an engine in this process would see.

    Raises:
        UserError: an image cannot be read, or the row holds what the API has no form for.
    """
    if videos_of(row.messages):
        raise UserError(f"{row.location}: the row has a video, and an endpoint takes text and images only")
    if row.prefill:
        raise UserError(
            f"{row.location}: every response begins with the row's prefill, which an endpoint cannot go on from"
        )
    check_asks(row)
    return [{"role": message.role, "content": _content(message, location=row.location)} for message in row.messages]


def completion_of(choice: object, *, num_tokens: int | None, location: str) -> Completion:
    """Return one of a reply's choices as a response.

    Raises:
        UserError: it is none, or it ended in a way that says nothing of the model, through a content filter for instance.
    """
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise UserError(f"{location}: the endpoint's reply has a choice without a message")
    ended = FINISH_REASONS.get(choice.get("finish_reason"))
    if ended is None:
        raise UserError(f"{location}: the endpoint ended the response with {choice.get('finish_reason')!r}")
    text = message.get("content")
    if text is None:
        # A refusal is the model's own answer, and thinking that took all tokens leaves none.
        text = message.get("refusal") or ("" if ended == "length" else None)
    if not isinstance(text, str):
        raise UserError(f"{location}: the endpoint's reply has content that is no text")
    if num_tokens is not None and num_tokens < 0:
        raise UserError(f"{location}: the endpoint's reply counts {num_tokens} tokens")
    return Completion(text=text, num_tokens=num_tokens, finish_reason=ended)


def _content(message: Message, *, location: str) -> str | list[dict[str, object]]:
    if all(isinstance(part, TextPart) for part in message.parts):
        return "".join(part.text for part in message.parts if isinstance(part, TextPart))
    return [_part(part, location=location) for part in message.parts]


def _part(part: Part, *, location: str) -> dict[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    assert isinstance(part, ImagePart), "videos are refused before"
    buffer = io.BytesIO()
    _within(load_image(part, location=location), part).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _within(image: Image.Image, part: ImagePart) -> Image.Image:
    """Return the image with the pixels that the row asks for; the server's image processor does not know these limits."""
    pixels = image.width * image.height
    wanted = pixels if part.min_pixels is None else max(pixels, part.min_pixels)
    wanted = wanted if part.max_pixels is None else min(wanted, part.max_pixels)
    if wanted == pixels:
        return image
    scale = math.sqrt(wanted / pixels)
    rounded = math.floor if wanted < pixels else math.ceil
    return image.resize(
        (max(1, rounded(image.width * scale)), max(1, rounded(image.height * scale))), Image.Resampling.BICUBIC
    )


KEY = "request"


class AnswerLog:
    """The responses to requests, by a key that says everything a response depends on.

    A request that failed is not in it, so the next session asks again. Of equal requests each has answers of its own.
    """

    def __init__(self, path: Path) -> None:
        """Read the answers of earlier sessions; raises UserError for a file of another kind."""
        self.path = path
        self._known: dict[str, list[tuple[Completion, ...]]] = defaultdict(list)
        cut_torn_line(path)
        if path.exists():
            for line in read_json_lines(path):
                assert line.record is not None, "the torn line was cut off"
                self._known[text_field(line.record, KEY, place=line.place)].append(
                    _completions(line.record, place=line.place)
                )
        self.known = sum(map(len, self._known.values()))
        """Requests that earlier sessions had answered."""
        self.taken = 0
        """Those of them that this session needed."""

    def take(self, key: str) -> tuple[Completion, ...] | None:
        """Return the responses that an earlier session got to such a request, once."""
        if not self._known[key]:
            return None
        self.taken += 1
        return self._known[key].pop(0)

    def add(self, key: str, completions: tuple[Completion, ...]) -> None:
        """Append the responses to a request; raises UserError where they cannot be written."""
        responses = [
            {"text": one.text, "tokens": one.num_tokens, "finish_reason": one.finish_reason} for one in completions
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_lines(self.path, [{KEY: key, "responses": responses}], readable=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); make room and go on") from error


def _completions(record: dict[str, object], *, place: str) -> tuple[Completion, ...]:
    responses = record.get("responses")
    if not isinstance(responses, list) or not all(isinstance(response, dict) for response in responses):
        raise UserError(f"{place}: responses must be a list of objects; delete the line to ask again")
    return tuple(_completion(response, place=place) for response in responses)


def _completion(record: dict[str, object], *, place: str) -> Completion:
    reason = text_field(record, "finish_reason", place=place)
    ended: FinishReason | None = "stop" if reason == "stop" else "length" if reason == "length" else None
    if ended is None:
        raise UserError(f"{place}: finish_reason must be stop or length, found {reason!r}; delete the line")
    tokens = None if record.get("tokens") is None else count_field(record, "tokens", place=place)
    return Completion(text=text_field(record, "text", place=place), num_tokens=tokens, finish_reason=ended)


# What passes: a time-out, a conflict, too many requests. Errors of the server itself do, too.
TRANSIENT_STATUSES = (408, 409, 425, 429)
# What holds for every row alike: no key or a wrong one, no such model, another address.
HOPELESS_STATUSES = (301, 302, 307, 308, 401, 402, 403, 404)
LONGEST_WAIT_SECONDS = 60.0
LONGEST_REASON = 300
_BACKOFF = tenacity.wait_exponential(multiplier=0.5, max=LONGEST_WAIT_SECONDS) + tenacity.wait_random(0, 0.5)


@dataclass(frozen=True, kw_only=True)
class GeneratorEndpoint:
    """Where requests go and how they are made."""

    url: str
    """The API's base, `https://api.openai.com/v1`; `/chat/completions` is put behind it."""
    model: str
    api_key: str | None = field(repr=False)
    """Sent as a bearer token, and never written or shown."""
    concurrency: int
    """Rows that are asked at the same time."""
    timeout_seconds: float
    """Of one attempt."""
    attempts: int
    """Of one request, the first included."""
    body: Mapping[str, Any]
    """Fields put into every request; None takes one out."""


class EndpointError(UserError):
    """No row can be answered by this endpoint; the message says why."""


class _Transient(Exception):
    """An attempt failed, and a retry may succeed."""

    def __init__(self, reason: str, *, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class EndpointEngine:
    """Asks a server for responses; it gives no token ids, and where it does not count tokens, nobody does."""

    def __init__(self, settings: GeneratorEndpoint, *, log: AnswerLog) -> None:
        """Args:
        log: whatever it holds is not asked again, and what is answered goes there at once.
        """
        self.settings = settings
        self.log = log
        self._base = settings.url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None

    def check(self) -> None:
        """Raise EndpointError where the server cannot be reached or refuses the key."""
        self._loop.run_until_complete(self._check())

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield how each (index, row) went, in the order in which they end.

        Raises:
            EndpointError: the server says what would hold for every row.
        """
        source = iter(rows)
        tasks: set[asyncio.Task[Outcome]] = set()
        try:
            while True:
                while len(tasks) < self.settings.concurrency and (item := next(source, None)) is not None:
                    tasks.add(self._loop.create_task(self._outcome(*item, sampling=sampling)))
                if not tasks:
                    return
                waiting = asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                done, _ = self._loop.run_until_complete(waiting)
                for task in done:
                    tasks.remove(task)
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(_ended(tasks))

    def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._loop.run_until_complete(self._session.close())
        self._loop.close()

    async def _check(self) -> None:
        url = f"{self._base}/models"
        try:
            async with self._connected().get(url, allow_redirects=False) as reply:
                # Not every server lists its models; only what it says of the key counts.
                if reply.status in (401, 403):
                    raise EndpointError(self._told(reply.status, await reply.text()))
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise EndpointError(f"--endpoint {self.settings.url}: {_named(error)}; is the server up?") from error

    async def _outcome(self, index: int, row: Row, *, sampling: SamplingSettings) -> Outcome:
        began = time.perf_counter()
        try:
            # Reading and encoding images takes a while, and other rows' requests must not wait for it.
            body = await asyncio.to_thread(self._body, row, sampling)
            key = hashlib.sha256(json.dumps([self._base, sampling.n_samples, body]).encode()).hexdigest()
            known = self.log.take(key)
            completions = known or await self._completions(body, count=sampling.n_samples, location=row.location)
        except EndpointError:
            raise
        except UserError as error:
            return Outcome(index=index, row=row, reason=str(error))
        if known is None:
            self.log.add(key, completions)
        return Outcome(index=index, row=row, completions=completions, seconds=time.perf_counter() - began)

    def _body(self, row: Row, sampling: SamplingSettings) -> dict[str, object]:
        body = {
            "model": self.settings.model,
            "messages": openai_messages(row),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            **self.settings.body,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def _completions(self, body: Mapping[str, object], *, count: int, location: str) -> tuple[Completion, ...]:
        """Ask until there are `count` responses: some servers ignore `n` and return one."""
        found: list[Completion] = []
        while len(found) < count:
            wanted = count - len(found)
            reply = await self._reply(body if wanted == 1 else {**body, "n": wanted}, location=location)
            choices = reply.get("choices")
            if not isinstance(choices, list) or not choices:
                raise UserError(f"{location}: the endpoint's reply has no choices: {self._clean(json.dumps(reply))}")
            usage = reply.get("usage")
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            # It is the sum over the choices, so it tells of one response only where there is one.
            only = tokens if isinstance(tokens, int) and len(choices) == 1 else None
            found += [completion_of(choice, num_tokens=only, location=location) for choice in choices[:wanted]]
        return tuple(found)

    async def _reply(self, body: Mapping[str, object], *, location: str) -> dict[str, object]:
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Transient),
            stop=tenacity.stop_after_attempt(self.settings.attempts),
            wait=_wait,
            reraise=True,
        )
        try:
            return await attempts(self._attempt, body, location=location)
        except _Transient as error:
            tries = "1 attempt" if self.settings.attempts == 1 else f"{self.settings.attempts} attempts"
            raise UserError(f"{location}: no answer from the endpoint in {tries}; the last: {error}") from error

    async def _attempt(self, body: Mapping[str, object], *, location: str) -> dict[str, object]:
        url = f"{self._base}/chat/completions"
        try:
            async with self._connected().post(url, json=body, allow_redirects=False) as reply:
                text = await reply.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise _Transient(_named(error)) from error
        if reply.status in TRANSIENT_STATUSES or reply.status >= 500:
            raise _Transient(self._said(reply.status, text), wait_seconds=_seconds(reply.headers.get("Retry-After")))
        if reply.status in HOPELESS_STATUSES:
            raise EndpointError(self._told(reply.status, text))
        if reply.status != 200:
            raise UserError(f"{location}: the endpoint refused the row with {self._said(reply.status, text)}")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location}: the endpoint's reply is no JSON: {self._clean(text)}") from error
        if not isinstance(answer, dict):
            raise UserError(f"{location}: the endpoint's reply is no JSON object: {self._clean(text)}")
        return answer

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = self.settings.api_key
            self._session = aiohttp.ClientSession(
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout_seconds),
                connector=aiohttp.TCPConnector(limit=self.settings.concurrency),
                # The proxies that the environment names; what runs on this machine needs none.
                trust_env=urlsplit(self._base).hostname not in ("localhost", "127.0.0.1", "::1"),
            )
        return self._session

    def _told(self, status: int, text: str) -> str:
        advice = {
            401: "set --api_key_env to the variable that holds a valid key",
            403: "the key does not allow it",
            404: f"check the address and --model {self.settings.model}",
        }
        where = f"--endpoint {self.settings.url}: it answers with {self._said(status, text)}"
        return f"{where}; {advice.get(status, 'no row can be answered')}"

    def _said(self, status: int, text: str) -> str:
        """Return the status and the server's message, if any."""
        try:
            error = json.loads(text).get("error", text)
            message = error.get("message", text) if isinstance(error, dict) else error
        except (ValueError, AttributeError, RecursionError):
            message = text
        words = self._clean(str(message))
        return f"status {status} ({words})" if words else f"status {status}"

    def _clean(self, text: str) -> str:
        """Return a message as a short line without the API key, which some servers repeat."""
        if self.settings.api_key:
            text = text.replace(self.settings.api_key, "***")
        text = " ".join(text.split())
        return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


async def _ended(tasks: set[asyncio.Task[Outcome]]) -> None:
    """Wait for tasks that were cancelled, or that failed in addition to the one whose error is raised."""
    await asyncio.gather(*tasks, return_exceptions=True)


def _named(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no answer within --endpoint_timeout"
    return str(error) or type(error).__name__


def _seconds(value: str | None) -> float | None:
    """Return the seconds of `Retry-After`; a date is ignored."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


def _wait(state: tenacity.RetryCallState) -> float:
    """Return the wait that the server asks for, otherwise one that grows with each attempt."""
    error = None if state.outcome is None else state.outcome.exception()
    asked = error.wait_seconds if isinstance(error, _Transient) else None
    return _BACKOFF(state) if asked is None else min(asked, LONGEST_WAIT_SECONDS)
