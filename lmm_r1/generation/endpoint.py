"""Generation by an OpenAI-compatible endpoint: messages, requests, and the log of its answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from lmm_r1.data.images import load_image, within_bounds
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart, check_asks, videos_of
from lmm_r1.data.sample import Completion, FinishReason
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, cut_torn_line, read_json_lines, text_field
from lmm_r1.generation.engine import Outcome, SamplingSettings, outcomes_in
from remote_rm.service.access import is_local

FINISH_REASONS: dict[object, FinishReason] = {"stop": "stop", "eos_token": "stop", "length": "length"}


def openai_messages(row: Row) -> list[dict[str, object]]:
    """Return a row's messages with its images as PNG data URLs, with the pixels that an engine in this process would see.

    Raises:
        UserError: an image cannot be read, or the row has content that the API does not support.
    """
    if videos_of(row.messages):
        raise UserError(f"{row.location}: the row has a video, and an endpoint takes text and images only")
    if row.prefill:
        raise UserError(
            f"{row.location}: every response begins with the row's prefill, which an endpoint cannot continue"
        )
    check_asks(row)
    return [{"role": message.role, "content": _content(message, location=row.location)} for message in row.messages]


def completion_of(choice: object, *, num_tokens: int | None, location: str) -> Completion:
    """Return one of a reply's choices as a response.

    Raises:
        UserError: the choice is malformed, or ended for a reason unrelated to the model, such as a content filter.
    """
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise UserError(f"{location}: the endpoint's reply has a choice without a message")
    ended = FINISH_REASONS.get(choice.get("finish_reason"))
    if ended is None:
        raise UserError(f"{location}: the endpoint ended the response with {choice.get('finish_reason')!r}")
    text = message.get("content")
    if text is None:
        # A refusal is the model's own answer; a response cut off while thinking has no text.
        text = message.get("refusal") or ("" if ended == "length" else None)
    if not isinstance(text, str):
        raise UserError(f"{location}: the endpoint's reply has content that is not text")
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
    # The server's image processor does not know the row's pixel bounds.
    within_bounds(load_image(part, location=location), part).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


KEY = "request"


class AnswerLog:
    """The responses to requests, by a key of everything that a response depends on.

    Failed requests are not logged, so the next session repeats them. Each of several equal requests has its own answers.
    """

    def __init__(self, path: Path) -> None:
        """Read the answers of earlier sessions; raises UserError for a file with other content."""
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
        """The number of requests that earlier sessions have answered."""

    def take(self, key: str) -> tuple[Completion, ...] | None:
        """Return the responses that an earlier session got to such a request, each once."""
        if not self._known[key]:
            return None
        return self._known[key].pop(0)

    def add(self, key: str, completions: tuple[Completion, ...]) -> None:
        """Append the responses to a request; raises UserError if they cannot be written."""
        responses = [
            {"text": one.text, "tokens": one.num_tokens, "finish_reason": one.finish_reason} for one in completions
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_lines(self.path, [{KEY: key, "responses": responses}], readable=True)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); free some disk space and run the command again"
            ) from error


def _completions(record: Mapping[str, Any], *, place: str) -> tuple[Completion, ...]:
    try:
        return tuple(
            Completion(
                text=one["text"],
                num_tokens=one["tokens"],
                finish_reason="stop" if one["finish_reason"] == "stop" else "length",
            )
            for one in record["responses"]
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{place}: not an answer of an endpoint; delete the line to request it again") from error


# These hold for every row: a missing or wrong key, no such model, another address.
HOPELESS_STATUSES = (301, 302, 307, 308, 401, 402, 403, 404)
LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class GeneratorEndpoint:
    """Where requests go and how they are made."""

    url: str
    """The base of the API, such as `https://api.openai.com/v1`; `/chat/completions` is appended."""
    model: str
    api_key: str | None = field(repr=False)
    """Sent as a bearer token; never logged."""
    concurrency: int
    """Rows requested at the same time."""
    timeout_seconds: float
    """Time limit of one attempt."""
    attempts: int
    """Attempts per request, including the first."""
    body: Mapping[str, Any]
    """Fields added to every request; None removes one."""


class EndpointError(UserError):
    """No row can be answered by this endpoint; the message says why."""


class EndpointEngine:
    """Requests responses from a server. They have no token ids, and a number of tokens only if the server counts them."""

    def __init__(self, settings: GeneratorEndpoint, *, log: AnswerLog) -> None:
        """Args:
        log: requests in it are not sent again; new answers are added at once.
        """
        self.settings = settings
        self.log = log
        self._base = settings.url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._client = openai.AsyncOpenAI(
            base_url=self._base,
            # Without a key of its own, that of another service must not be sent.
            api_key=settings.api_key or "none",
            timeout=settings.timeout_seconds,
            max_retries=settings.attempts - 1,
            # A server on this machine needs no proxy. A redirect could send the key elsewhere.
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=not is_local(urlsplit(self._base).hostname or ""), follow_redirects=False
            ),
        )

    def check(self) -> None:
        """Raise EndpointError if the server cannot be reached or refuses the key."""
        try:
            self._loop.run_until_complete(self._client.with_options(max_retries=0).models.list())
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise self._hopeless(error) from error
        except openai.APIConnectionError as error:
            reason = self._reason(error)
            raise EndpointError(f"--endpoint {self.settings.url}: {reason}; is the server up?") from error
        except (openai.OpenAIError, ValueError):
            pass  # not every server lists its models

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield the outcome of each (index, row), in the order in which they end.

        Raises:
            EndpointError: the server's error applies to every row.
        """
        outcome_of = partial(self._outcome, sampling=sampling)
        return outcomes_in(self._loop, rows, outcome_of, at_once=self.settings.concurrency)

    def close(self) -> None:
        """Close the connections."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    async def _outcome(self, index: int, row: Row, *, sampling: SamplingSettings) -> Outcome:
        began = time.perf_counter()
        try:
            # Reading and encoding images must not delay the requests of other rows.
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
        """Send requests until there are `count` responses: some servers ignore `n` and return one."""
        found: list[Completion] = []
        while len(found) < count:
            wanted = count - len(found)
            reply = await self._reply(body if wanted == 1 else {**body, "n": wanted}, location=location)
            choices = reply.get("choices")
            if not isinstance(choices, list) or not choices:
                raise UserError(f"{location}: the endpoint's reply has no choices: {self._clean(json.dumps(reply))}")
            usage = reply.get("usage")
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            # The sum over all choices, which is known per response only if there is one.
            only = tokens if isinstance(tokens, int) and len(choices) == 1 else None
            found += [completion_of(choice, num_tokens=only, location=location) for choice in choices[:wanted]]
        return tuple(found)

    async def _reply(self, body: Mapping[str, object], *, location: str) -> dict[str, object]:
        try:
            text = await self._client.post("/chat/completions", cast_to=str, body=body)
        except openai.APIStatusError as error:
            if error.status_code in HOPELESS_STATUSES:
                raise self._hopeless(error) from error
            told = f"the endpoint refused the row with {self._reason(error)}"
            if error.status_code >= 500 or error.status_code in (408, 409, 429):  # those that the client retries
                told = f"no answer from the endpoint in {self.settings.attempts} attempts; the last: {self._reason(error)}"
            raise UserError(f"{location}: {told}") from error
        except openai.APIConnectionError as error:
            told = f"no answer from the endpoint in {self.settings.attempts} attempts; the last: {self._reason(error)}"
            raise UserError(f"{location}: {told}") from error
        try:
            answer = json.loads(text)
            if not isinstance(answer, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location}: the endpoint's reply is not a JSON object: {self._clean(text)}") from error
        return answer

    def _hopeless(self, error: openai.APIStatusError) -> EndpointError:
        advice = {
            401: "set --api_key_env to the variable that holds a valid key",
            403: "the key does not allow it",
            404: f"check the address and --model {self.settings.model}",
        }
        where = f"--endpoint {self.settings.url}: it answers with {self._reason(error)}"
        return EndpointError(f"{where}; {advice.get(error.status_code, 'no row can be answered')}")

    def _reason(self, error: openai.APIError) -> str:
        """Return why a request failed: the server's status and message, or the error of the connection."""
        if isinstance(error, openai.APITimeoutError):
            return "no answer within --endpoint_timeout"
        if not isinstance(error, openai.APIStatusError):
            return str(error.__cause__ or error)
        message = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
        words = self._clean(str(message or ""))
        return f"status {error.status_code} ({words})" if words else f"status {error.status_code}"

    def _clean(self, text: str) -> str:
        """Return a message as a short line without the API key, which some servers repeat."""
        if self.settings.api_key:
            text = text.replace(self.settings.api_key, "***")
        text = " ".join(text.split())
        return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
