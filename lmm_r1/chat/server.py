"""The OpenAI chat API for a model."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion, TokenLogProb
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Asked, AskedRows, Outcome, SamplingSettings, TextPiece
from remote_rm.protocol import check_json
from remote_rm.service.middleware import RequestRecord, RolloutSampler, guard, log_request
from remote_rm.verifier import STOPPING, PoolUnavailable, ServiceLimits, check_room

logger = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """The engine failed while it answered; the log has its traceback."""


@dataclass(kw_only=True, eq=False)
class _QueuedChat:
    asked: Asked
    events: asyncio.Queue[TextPiece | Outcome | Exception]
    is_over: bool = False
    """Whether it was answered, refused or abandoned."""


class _Taken(AskedRows):
    """The conversations that the engine takes from the queue, numbered; more may be added meanwhile."""

    def __init__(self, waiting: deque[_QueuedChat]) -> None:
        self._waiting = waiting
        self._number = itertools.count()
        self.jobs: dict[int, _QueuedChat] = {}

    def __next__(self) -> tuple[int, Asked]:
        while self._waiting:
            job = self._waiting.popleft()
            if not job.is_over:
                number = next(self._number)
                self.jobs[number] = job
                return number, job.asked
        raise StopIteration

    def is_abandoned(self, index: int) -> bool:
        if index in self.jobs and self.jobs[index].is_over:
            del self.jobs[index]
        return index not in self.jobs


class ServedModel:
    """Answers conversations in the order of arrival, many at a time.

    At most `max_waiting` responses may wait, unless none waits. It belongs to the event loop of `start`. One thread loads
    the engine and runs it, because PyTorch gives each computing thread its own threads, which would compete on a CPU.
    """

    def __init__(self, load: Callable[[], ChatModel], *, max_waiting: int) -> None:
        """Load the model; raises its errors."""
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.model = self._thread.submit(load).result()
        self._waiting: deque[_QueuedChat] = deque()
        self._open: set[_QueuedChat] = set()
        self._has_jobs = asyncio.Event()
        self._is_refusing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answering: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(job.asked.sampling.n_samples for job in list(self._waiting))

    @property
    def open(self) -> int:
        return len(self._open)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answering = self._loop.create_task(self._answer_all())

    def refuse(self) -> None:
        """Refuse new conversations; those in progress raise PoolUnavailable."""
        self._is_refusing = True
        for job in self._open:
            self._hand_on(job, PoolUnavailable(STOPPING, retry_after_seconds=1))

    async def stop(self) -> None:
        """Drop what waits, finish the responses in progress, and free the model's memory."""
        self.refuse()
        assert self._answering is not None, "start() comes first"
        self._answering.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self.model.engine.close)
        self._thread.shutdown()

    async def answer(self, row: Row, sampling: SamplingSettings) -> Outcome:
        """Return the outcome of a conversation; cancelling it frees its place. Raises as `stream`."""
        async with aclosing(self.stream(row, sampling, in_pieces=False)) as events:
            outcome = await anext(events)
        assert isinstance(outcome, Outcome)
        return outcome

    async def stream(
        self, row: Row, sampling: SamplingSettings, *, in_pieces: bool = True
    ) -> AsyncGenerator[TextPiece | Outcome, None]:
        """Yield the pieces of the responses to a conversation, then its outcome; leaving early frees its place.

        Raises:
            PoolUnavailable: too many wait, or the server is stopping.
            EngineFailed: the engine failed.
        """
        if self._is_refusing:
            raise PoolUnavailable(STOPPING, retry_after_seconds=1)
        check_room(
            waiting=self.waiting,
            more=sampling.n_samples,
            max_queued_items=self._max_waiting,
            what="responses wait to be generated",
            retry_after_seconds=1.0,
        )
        job = _QueuedChat(asked=Asked(row=row, sampling=sampling), events=asyncio.Queue())
        if in_pieces:
            job.asked = replace(job.asked, on_piece=partial(self._send, job))
        self._open.add(job)
        self._waiting.append(job)
        self._has_jobs.set()
        try:
            while not job.is_over or not job.events.empty():
                event = await job.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            job.is_over = True
            self._open.discard(job)

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_jobs.wait()
            self._has_jobs.clear()
            await loop.run_in_executor(self._thread, self._answer_waiting)

    def _answer_waiting(self) -> None:
        while self._waiting:
            taken = _Taken(self._waiting)
            try:
                for outcome in self.model.engine.answer(taken):
                    if (job := taken.jobs.pop(outcome.index, None)) is not None:
                        self._send(job, outcome)
                    if self._is_refusing:
                        return
            except Exception:  # report any error to all clients that wait, and continue serving
                logger.exception("the engine failed in %d conversations", len(taken.jobs))
                for job in taken.jobs.values():
                    self._send(job, EngineFailed("the engine failed; see the server's log"))

    def _send(self, job: _QueuedChat, event: TextPiece | Outcome | EngineFailed) -> None:
        """Hand an event on from the engine's thread."""
        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(self._hand_on, job, event)

    def _hand_on(self, job: _QueuedChat, event: TextPiece | Outcome | Exception) -> None:
        if not job.is_over:
            job.is_over = not isinstance(event, TextPiece)
            job.events.put_nowait(event)


READERS = 4
"""Threads that read messages and fetch images, to not block the event loop or the engine."""
_LOCATION = "messages"
# Fields that change no answer here, whatever their value; and values of others that ask for what is done anyway.
_IDLE = frozenset(
    "user metadata store service_tier parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier "
    "request_id priority include_obfuscation".split()
)
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **{"response_format": ({"type": "text"},), "modalities": (["text"],), "verbosity": ("medium",)},
    **dict.fromkeys(("best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("min_p", "min_tokens", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("continue_final_message", "add_special_tokens", "continuous_usage_stats"), (False,)),
}


class _Fields(BaseModel):
    """Fields of the API; null, an empty list or object, and harmless values ask for nothing, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _asking(cls, given: Any) -> Any:
        asking = {}
        for name, value in (given if isinstance(given, dict) else {}).items():
            if isinstance(value, dict):
                value = {key: one for key, one in value.items() if one is not None}
            harmless = () if name in cls.model_fields else ([], {}, *_HARMLESS.get(name, ()))
            if name not in _IDLE and value not in (None, *harmless):
                asking[name] = value
        return asking


class StreamOptions(_Fields):
    include_usage: bool = False


class ChatRequest(_Fields):
    """The supported fields of OpenAI's chat API; others are refused by name, because they would change the answer."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=64)] = ""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    @property
    def sampling(self) -> SamplingSettings:
        """The settings without the server's longest answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingSettings(
            n_samples=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
            top_k=self.top_k or -1,
            stops=tuple(filter(None, stops)),
            seed=None if self.seed is None else self.seed % 2**62,  # OpenAI's may be negative, the engines' not
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logprobs=self.top_logprobs if self.logprobs else None,
        )


class RefusedChat(Exception):
    """A request that is refused, with its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class LoggedChat:
    """A request in the access log, which shows a share of them."""

    prompt: str


@dataclass(frozen=True, kw_only=True)
class LoggedAnswer:
    response: str


class ChatService:
    def __init__(
        self, model: ServedModel, *, name: str, media: MediaAccess, max_new_tokens: int | None, max_choices: int
    ) -> None:
        # Without `max_new_tokens`, a response may take what the conversation leaves.
        self.model = model
        self.name = name
        self._media = media
        self._max_new_tokens = max_new_tokens
        self._max_choices = max_choices
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="chat reader")

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def reply(
        self, body: bytes, *, record: RequestRecord, sampler: RolloutSampler
    ) -> dict[str, object] | AsyncIterator[str]:
        """Return the completion in the API's form, or the events of its stream.

        Raises RefusedChat, PoolUnavailable or EngineFailed, for a stream before its first event.
        """
        request, row = await asyncio.get_running_loop().run_in_executor(self._readers, self._read, body)
        sampling = request.sampling
        if sampling.max_new_tokens is None:
            sampling = replace(sampling, max_new_tokens=self._max_new_tokens)

        def answered(outcome: Outcome) -> Outcome:
            if outcome.reason is not None:
                raise RefusedChat(400, outcome.reason)
            record.items = len(outcome.completions)
            chats = [LoggedChat(prompt=json.dumps(request.messages, ensure_ascii=False))] * record.items
            record.rollouts = sampler.rollouts(chats, [LoggedAnswer(response=one.text) for one in outcome.completions])
            return outcome

        completion = CompletionForm(model=self.name, has_log_probs=request.logprobs)
        if not request.stream:
            return completion.whole(answered(await self.model.answer(row, sampling)))
        events = self.model.stream(row, sampling)
        first = await anext(events)
        if isinstance(first, Outcome):
            answered(first)
        return completion.streamed(first, events, answered=answered, request=request)

    def _read(self, body: bytes) -> tuple[ChatRequest, Row]:
        try:
            check_json(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise RefusedChat(400, f"the body is not usable JSON: {error}") from error
        try:
            request = ChatRequest.model_validate_json(body)
        except ValidationError as error:
            faults = [
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)[:5]
            ]
            fields = ", ".join(ChatRequest.model_fields)
            raise RefusedChat(400, f"{'; '.join(faults)}; the fields are {fields}") from error
        if request.model != self.name:
            raise RefusedChat(404, f"there is no model {request.model[:200]!r} here; this server has {self.name!r}")
        if request.n > self._max_choices:
            raise RefusedChat(400, f"n {request.n} is more than --max_request_items {self._max_choices}")
        if request.top_logprobs and not request.logprobs:
            raise RefusedChat(400, "top_logprobs needs logprobs: true")
        defaults = ChatRequest(model=request.model, messages=request.messages).sampling
        for name in sorted(self.model.model.engine.not_supported):
            if getattr(request.sampling, name) != getattr(defaults, name):
                raise RefusedChat(400, f"{name} needs --backend vllm; this server runs with --backend transformers")
        try:
            row = self._media.row_of(json.dumps(request.messages), location=_LOCATION)
            if row is None:
                raise UserError(f"{_LOCATION}: each must be an object with role and content")
            if row.messages[-1].role == "assistant":
                raise UserError(f"{_LOCATION}: the last is the assistant's, so there is nothing to answer")
        except UserError as error:
            raise RefusedChat(400, str(error)) from error
        return request, row


class CompletionForm:
    """Writes one completion as OpenAI's API has it."""

    def __init__(self, *, model: str, has_log_probs: bool) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._has_log_probs = has_log_probs

    def whole(self, outcome: Outcome) -> dict[str, object]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": one.text},
                "logprobs": self._log_probs(one.log_probs),
                "finish_reason": _finish_reason(one),
            }
            for index, one in enumerate(outcome.completions)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": _usage(outcome)}

    async def streamed(
        self,
        first: TextPiece | Outcome,
        events: AsyncGenerator[TextPiece | Outcome, None],
        *,
        answered: Callable[[Outcome], Outcome],
        request: ChatRequest,
    ) -> AsyncIterator[str]:
        """Yield the server-sent events; a failure is the last of them, as the API has it."""
        for place in range(request.n):
            yield self._event(place, {"role": "assistant", "content": ""})
        async with aclosing(events):
            try:
                event = first
                while isinstance(event, TextPiece):
                    yield self._event(event.place, {"content": event.text}, log_probs=event.log_probs)
                    event = await anext(events)
                outcome = answered(event)
            except (EngineFailed, PoolUnavailable, RefusedChat) as error:
                yield _sent({"error": {"message": str(error), "type": "server_error"}})
                return
        for place, one in enumerate(outcome.completions):
            yield self._event(place, {}, finish_reason=_finish_reason(one))
        if request.stream_options.include_usage:
            yield _sent({**self._chunk, "choices": [], "usage": _usage(outcome)})
        yield "data: [DONE]\n\n"

    @property
    def _chunk(self) -> dict[str, object]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _event(
        self,
        place: int,
        delta: dict[str, str],
        *,
        log_probs: tuple[TokenLogProb, ...] = (),
        finish_reason: str | None = None,
    ) -> str:
        logged = self._log_probs(log_probs) if log_probs else None
        choice = {"index": place, "delta": delta, "logprobs": logged, "finish_reason": finish_reason}
        return _sent({**self._chunk, "choices": [choice]})

    def _log_probs(self, tokens: tuple[TokenLogProb, ...]) -> dict[str, object] | None:
        if not self._has_log_probs:
            return None
        return {
            "content": [
                _log_prob(one.text, one.log_prob) | {"top_logprobs": [_log_prob(*other) for other in one.likeliest]}
                for one in tokens
            ]
        }


def _log_prob(text: str, log_prob: float) -> dict[str, object]:
    # A token that is a part of a character has no bytes of its own text.
    return {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finish_reason(completion: Completion) -> str:
    return "stop" if completion.finish_reason == "stop" else "length"


def _usage(outcome: Outcome) -> dict[str, int]:
    generated = sum(one.num_tokens or 0 for one in outcome.completions)
    read = outcome.prompt_tokens or 0
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def _sent(event: dict[str, object]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def create_app(service: ChatService, *, limits: ServiceLimits, token: str | None, log_sample_share: float) -> FastAPI:
    """Return the application, whose model answers from startup to shutdown; `app.state.refuse()` ends open requests."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.model.start()
        try:
            yield
        finally:
            service.close()
            await service.model.stop()

    app = FastAPI(title="lmm-r1 chat server", lifespan=lifespan, openapi_url=None)
    guard(app, limits=limits, token=token, on_answered=log_request, refuse=service.model.refuse)
    app.add_exception_handler(RefusedChat, _refused)
    app.add_exception_handler(EngineFailed, _failed)
    _add_routes(app, service, RolloutSampler(log_sample_share))
    return app


def _add_routes(app: FastAPI, service: ChatService, sampler: RolloutSampler) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        reply = await service.reply(await request.body(), record=request.state.record, sampler=sampler)
        if isinstance(reply, dict):
            return JSONResponse(reply)
        return StreamingResponse(reply, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": service.name, "object": "model", "owned_by": "lmm-r1"}]}

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {"status": "ok", "waiting": service.model.waiting, "open": service.model.open}


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedChat)
    return _error_reply(error.status, str(error), kind="invalid_request_error")


async def _failed(_request: Request, error: Exception) -> JSONResponse:
    return _error_reply(500, str(error), kind="server_error")


def _error_reply(status: int, message: str, *, kind: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind}}, status_code=status)
