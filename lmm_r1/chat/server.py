"""The OpenAI chat API for a model."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.data.messages import Row
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Outcome, SamplingSettings
from remote_rm.protocol import check_json
from remote_rm.service.middleware import RequestRecord, RolloutSampler, guard, log_request
from remote_rm.verifier import STOPPING, PoolUnavailable, ServiceLimits, check_room

logger = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """The engine failed while it answered; the log has its traceback."""


@dataclass(kw_only=True, eq=False)
class _QueuedChat:
    row: Row
    sampling: SamplingSettings
    outcome: asyncio.Future[Outcome]


class _Taken(Iterator[tuple[int, Row]]):
    """The conversations at the head of a queue that have the settings of the first, numbered; more may be added meanwhile."""

    def __init__(self, waiting: deque[_QueuedChat]) -> None:
        self._waiting = waiting
        self._number = itertools.count()
        self.sampling = waiting[0].sampling
        self.jobs: dict[int, _QueuedChat] = {}

    def __next__(self) -> tuple[int, Row]:
        while self._waiting and self._waiting[0].sampling == self.sampling:
            job = self._waiting.popleft()
            # If it is done, its client has disconnected.
            if not job.outcome.done():
                number = next(self._number)
                self.jobs[number] = job
                return number, job.row
        raise StopIteration

    def is_abandoned(self, index: int) -> bool:
        return index in self.jobs and self.jobs[index].outcome.done()


class ServedModel:
    """Answers conversations in the order of arrival; those with the same sampling settings are computed together.

    At most `max_waiting` responses may wait, unless none waits. It belongs to the event loop of `start`. One thread loads the engine and runs it, because PyTorch gives each
    computing thread its own threads, which would compete on a CPU.
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
        return sum(job.sampling.n_samples for job in list(self._waiting))

    @property
    def open(self) -> int:
        return len(self._open)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answering = self._loop.create_task(self._answer_all())

    def refuse(self) -> None:
        """Refuse new conversations; `answer` raises PoolUnavailable, also for those in progress."""
        self._is_refusing = True
        for job in self._open:
            if not job.outcome.done():
                job.outcome.set_exception(PoolUnavailable(STOPPING, retry_after_seconds=1))

    async def stop(self) -> None:
        """Drop what waits, finish the responses in progress, and free the model's memory."""
        self.refuse()
        assert self._answering is not None, "start() comes first"
        self._answering.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self.model.engine.close)
        self._thread.shutdown()

    async def answer(self, row: Row, sampling: SamplingSettings) -> Outcome:
        """Return the outcome of a conversation; cancelling it frees its place in the queue.

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
        job = _QueuedChat(row=row, sampling=sampling, outcome=asyncio.get_running_loop().create_future())
        self._open.add(job)
        self._waiting.append(job)
        self._has_jobs.set()
        try:
            return await job.outcome
        finally:
            job.outcome.cancel()
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
                for outcome in self.model.engine.respond(taken, taken.sampling):
                    self._settle(taken.jobs.pop(outcome.index), outcome)
                    if self._is_refusing:
                        return
            except Exception:  # report any error to all clients that wait, and continue serving
                logger.exception("the engine failed in %d conversations", len(taken.jobs))
                for job in taken.jobs.values():
                    self._settle(job, EngineFailed("the engine failed; see the server's log"))

    def _settle(self, job: _QueuedChat, outcome: Outcome | EngineFailed) -> None:
        def settle() -> None:
            if job.outcome.done():
                return
            if isinstance(outcome, EngineFailed):
                job.outcome.set_exception(outcome)
            else:
                job.outcome.set_result(outcome)

        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(settle)


READERS = 4
"""Threads that read messages and fetch images, to not block the event loop or the engine."""
_LOCATION = "messages"


class ChatRequest(BaseModel):
    """The supported fields of OpenAI's chat API; others are refused by name, because they would change the answer."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: Literal[False] | None = None
    # These do not affect the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


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

    async def reply(self, body: bytes, *, record: RequestRecord, sampler: RolloutSampler) -> dict[str, Any]:
        """Return the completion in the API's form; raises RefusedChat, PoolUnavailable or EngineFailed."""
        request, row = await asyncio.get_running_loop().run_in_executor(self._readers, self._read, body)
        asked = request.max_completion_tokens or request.max_tokens or self._max_new_tokens
        sampling = SamplingSettings(
            n_samples=request.n,
            temperature=request.temperature,
            top_p=request.top_p,
            max_new_tokens=asked,
            top_k=request.top_k or -1,
        )
        outcome = await self.model.answer(row, sampling)
        if outcome.reason is not None:
            raise RefusedChat(400, outcome.reason)
        record.items = len(outcome.completions)
        chats = [LoggedChat(prompt=json.dumps(request.messages, ensure_ascii=False))] * record.items
        record.rollouts = sampler.rollouts(chats, [LoggedAnswer(response=one.text) for one in outcome.completions])
        return self._completion(outcome)

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
        try:
            row = self._media.row_of(json.dumps(request.messages), location=_LOCATION)
            if row is None:
                raise UserError(f"{_LOCATION}: each must be an object with role and content")
            if row.messages[-1].role == "assistant":
                raise UserError(f"{_LOCATION}: the last is the assistant's, so there is nothing to answer")
        except UserError as error:
            raise RefusedChat(400, str(error)) from error
        return request, row

    def _completion(self, outcome: Outcome) -> dict[str, Any]:
        completions = outcome.completions
        generated = sum(one.num_tokens or 0 for one in completions)
        read = outcome.prompt_tokens or 0
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": one.text},
                    "finish_reason": "stop" if one.finish_reason == "stop" else "length",
                }
                for index, one in enumerate(completions)
            ],
            "usage": {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated},
        }


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
    async def chat(request: Request) -> JSONResponse:
        body = await request.body()
        return JSONResponse(await service.reply(body, record=request.state.record, sampler=sampler))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": service.name, "object": "model", "owned_by": "lmm-r1"}]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": service.model.waiting, "open": service.model.open}


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedChat)
    return _error_reply(error.status, str(error), kind="invalid_request_error")


async def _failed(_request: Request, error: Exception) -> JSONResponse:
    return _error_reply(500, str(error), kind="server_error")


def _error_reply(status: int, message: str, *, kind: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind}}, status_code=status)
