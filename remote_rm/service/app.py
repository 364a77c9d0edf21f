"""The HTTP application: POST /get_reward in OpenRLHF's protocol, POST /grade in OpenAI's, GET /health and GET /metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ValidationError

from remote_rm.protocol import GradeReply, GradeRequest, Health, Refusal, RewardReply, RewardRequest, check_json
from remote_rm.reward_function import items_from
from remote_rm.service.middleware import RequestRecord, RolloutSampler, guard, log_request, refusal
from remote_rm.service.pool import VerifierPool, judge_of
from remote_rm.verifier import (
    DEFAULT_LIMITS,
    Item,
    Judge,
    Score,
    ServiceLimits,
    UnusableItem,
    Verifier,
    check_labels,
    extra_logs_of,
)

logger = logging.getLogger(__name__)

INLINE_BYTES = 64 * 2**10
"""Up to so much is read without changing threads, which would take longer than the reading."""
READERS = 4


class TooManyItems(ValueError):
    """A request with more samples than one may hold."""

    def __init__(self, *, max_items: int) -> None:
        super().__init__(f"a request may hold {max_items} samples; send the others in requests of their own")
        self.max_items = max_items


class RequestReader:
    """Makes items of bodies, and keeps the event loop free while it does."""

    def __init__(self, items_of_request: Callable[[RewardRequest], Sequence[Any]], *, max_items: int) -> None:
        self.max_items = max_items
        self._items_of_request = items_of_request
        self._threads = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="request reader")

    async def items(self, body: bytes, *, is_graded: bool = False) -> Sequence[Any]:
        """Return the items to judge: those of a RewardRequest, or the one of a GradeRequest.

        Raises TooManyItems, RequestValidationError for an invalid request, and the errors of `items_of_request`.
        """
        if len(body) <= INLINE_BYTES:
            return self._items(body, is_graded)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._items, body, is_graded)

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _items(self, body: bytes, is_graded: bool) -> Sequence[Any]:
        text = _text_of(body)
        try:
            check_json(text)
        except ValueError as error:
            _refuse(str(error), place=0)
        try:
            request = json.loads(text)
        except json.JSONDecodeError as error:
            _refuse(error.msg, place=error.pos)
        if isinstance(request, dict) and any(
            isinstance(column, list) and len(column) > self.max_items for column in request.values()
        ):
            raise TooManyItems(max_items=self.max_items)
        try:
            if is_graded:
                return self._items_of_request(GradeRequest.model_validate(request).as_rewards())
            return self._items_of_request(RewardRequest.model_validate(request))
        except ValidationError as error:
            raise _invalid(
                *error.errors(include_url=False, include_context=False, include_input=False)[:20]
            ) from error


def _text_of(body: bytes) -> str:
    try:
        # As json.loads does it, which also reads the other encodings of Unicode.
        return body.decode(json.detect_encoding(body), "surrogatepass")
    except UnicodeDecodeError as error:
        _refuse(f"the body is no text ({error.reason})", place=error.start)


def _refuse(reason: str, *, place: int) -> NoReturn:
    raise _invalid({"type": "json_invalid", "loc": (place,), "msg": f"JSON decode error: {reason}"})


def _invalid(*entries: Any) -> RequestValidationError:
    return RequestValidationError([{**entry, "loc": ("body", *entry["loc"])} for entry in entries])


SERVICE_NAME = "lmm-r1 reward server"
DESCRIPTION = """Rewards for reinforcement learning, in the protocol of OpenRLHF's remote reward models.

A request holds parallel lists, one entry per sample; the reply holds as many numbers, in the same order. A response that
cannot be judged within the time limit scores 0 and is reported as `timed_out`; it never fails the request it came with.
"""
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Refusal, "description": "The service wants a bearer token, and the request has another or none."},
    408: {"model": Refusal, "description": "The body did not come in within `--body-timeout-seconds`."},
    413: {
        "model": Refusal,
        "description": "The body is larger than `--max-request-mib`, or holds more than `--max-request-items` samples: "
        "then `max_request_items` says how many it may hold.",
    },
    422: {
        "model": Refusal,
        "description": "Lists of unequal length, a sample that cannot be judged, or no such JSON. Nothing is scored.",
    },
    503: {
        "model": Refusal,
        "description": "`--max-queued-items` items would wait, `--max-open-mib` or `--max-connections` is reached, or the "
        "service is stopping: try again after `Retry-After` seconds.",
        "headers": {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}},
    },
}
KNOWN_PATHS = frozenset(("/get_reward", "/grade", "/health", "/metrics", "/docs", "/redoc", "/openapi.json"))
"""Others are counted together: anyone can ask for any path."""


def body_of(request: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that `RequestReader` reads, of which FastAPI does not know."""
    schema = {"$ref": f"#/components/schemas/{request.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITEM_KINDS = ("quick", "worker", "timed_out", "failed")


class ServiceMetrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, judge: Judge) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_JudgeCollector(judge))
        self._requests = Counter(
            "remote_rm_requests", "Requests answered.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "remote_rm_request_seconds",
            "Time from the head of a /get_reward request to the end of its reply.",
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    def count(self, record: RequestRecord) -> None:
        """Add one answered request."""
        path = record.path if record.path in KNOWN_PATHS else "other"
        self._requests.labels(path, str(record.status)).inc()
        if record.path == "/get_reward":
            self._seconds.observe(record.seconds)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _JudgeCollector(Collector):
    """Reads the judge's own counts at the time of asking."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def collect(self) -> Iterator[Metric]:
        items = CounterMetricFamily("remote_rm_items", "Items judged, by where that ended.", labels=("kind",))
        for kind in ITEM_KINDS:
            items.add_metric((kind,), getattr(self._judge.counts, kind))
        yield items
        yield CounterMetricFamily(
            "remote_rm_lost_workers", "Workers killed from outside.", value=self._judge.counts.lost_workers
        )
        yield GaugeMetricFamily("remote_rm_queued_items", "Items that wait for a worker.", value=self._judge.waiting)
        yield GaugeMetricFamily("remote_rm_busy_items", "Items that are with a worker.", value=self._judge.busy)
        yield GaugeMetricFamily("remote_rm_workers", "Worker processes alive.", value=self._judge.workers)


class RewardService(FastAPI):
    """The application, whose document also describes the requests, which FastAPI does not read itself."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for request in (RewardRequest, GradeRequest):
            schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
            document["components"]["schemas"] |= {**schema.pop("$defs", {}), request.__name__: schema}
        return document


def create_app(
    verifier: Verifier,
    *,
    workers: int,
    item_timeout_seconds: float,
    limits: ServiceLimits = DEFAULT_LIMITS,
    token: str | None = None,
    log_sample_share: float = 0.0,
) -> FastAPI:
    """Return the application of a verifier, whose worker processes run from startup to shutdown; see `create_service`."""

    def items_of_request(request: RewardRequest) -> list[Item]:
        items = items_of(request)
        check_labels(items, verifier=verifier)
        return items

    return create_service(
        judge_of(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds, limits=limits),
        items_of_request=items_of_request,
        limits=limits,
        token=token,
        log_sample_share=log_sample_share,
        is_verifier=True,
    )


def create_service(
    judge: Judge,
    *,
    items_of_request: Callable[[RewardRequest], Sequence[Any]],
    limits: ServiceLimits,
    token: str | None,
    log_sample_share: float,
    is_verifier: bool = False,
) -> FastAPI:
    """Return the application around a judge, which runs from startup to shutdown; `app.state.refuse()` ends all that is open.

    Args:
        items_of_request: what the judge is to judge, one item per sample; raises UnusableItem for a wrong request.
        token: what a request must bring as its bearer token; None asks for none.
        log_sample_share: the share of items, from 0 to 1, that the access log shows whole.
        is_verifier: it also answers POST /grade, which has no prompt, and answers what a pool decides quickly while its
            workers start; if they do not come up, `app.state.fail(error)` is called.
    """
    metrics = ServiceMetrics(judge)
    reader = RequestReader(items_of_request, max_items=limits.max_request_items)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.ensure_future(judge.start())
        if not (is_verifier and isinstance(judge, VerifierPool)):
            await starting
        else:
            starting.add_done_callback(on_started)
        try:
            yield
        finally:
            reader.close()
            await asyncio.wait((starting,))
            await judge.stop()

    def on_started(starting: asyncio.Future[None]) -> None:
        error = None if starting.cancelled() else starting.exception()
        if error is not None:
            app.state.fail(error)

    def on_answered(record: RequestRecord) -> None:
        metrics.count(record)
        log_request(record)

    app = RewardService(title=SERVICE_NAME, description=DESCRIPTION, lifespan=lifespan)
    app.state.fail = lambda error: logger.error("%s", error)
    guard(app, limits=limits, token=token, on_answered=on_answered, refuse=judge.refuse)
    app.add_exception_handler(RequestValidationError, refuse_invalid)
    app.add_exception_handler(TooManyItems, refuse_large)
    app.add_exception_handler(UnusableItem, refuse_item)
    sampler = RolloutSampler(log_sample_share)
    _add_routes(app, judge=judge, reader=reader, metrics=metrics, sampler=sampler, is_verifier=is_verifier)
    return app


def _add_routes(
    app: FastAPI,
    *,
    judge: Judge,
    reader: RequestReader,
    metrics: ServiceMetrics,
    sampler: RolloutSampler,
    is_verifier: bool,
) -> None:
    async def scores_of(request: Request, *, is_graded: bool = False) -> list[Score]:
        if "json" not in request.headers.get("content-type", ""):
            raise UnusableItem("the body is not said to be JSON: send the header `Content-Type: application/json`")
        items = await reader.items(await request.body(), is_graded=is_graded)
        record: RequestRecord = request.state.record
        record.items = len(items)
        scores = await judge.judge(items)
        record.rollouts = sampler.rollouts(items, scores)
        return scores

    if is_verifier:

        @app.post("/grade", summary="Grade one sample", responses=REFUSALS, openapi_extra=body_of(GradeRequest))
        async def grade(request: Request) -> GradeReply:
            """Judge a sample as an endpoint grader of OpenAI's reinforcement fine-tuning."""
            (score,) = await scores_of(request, is_graded=True)
            return GradeReply(score=score.score, reward=score.reward, parts=score.parts)

    @app.post("/get_reward", summary="Judge samples", responses=REFUSALS, openapi_extra=body_of(RewardRequest))
    async def get_reward(request: Request) -> RewardReply:
        """Judge every sample by what this service was started with."""
        return reply_from(await scores_of(request))

    @app.get("/health", summary="Is it up")
    async def health() -> Health:
        """Answer as long as requests can be taken on, with what was done so far; needs no token."""
        return Health(
            status="ok",
            service=SERVICE_NAME,
            verifier=judge.name,
            waiting=judge.waiting,
            busy=judge.busy,
            workers=judge.workers,
            max_request_items=reader.max_items,
            **vars(judge.counts),
        )

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def prometheus() -> Response:
        """Counts requests by status and items by the place of decision, and measures latency and queue."""
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def refuse_invalid(_request: Request, error: Exception) -> JSONResponse:
    """Describe what is wrong with a request (422), without sending it back: it may be large or not valid text."""
    assert isinstance(error, RequestValidationError)
    told = [{"loc": entry["loc"], "msg": entry["msg"], "type": entry["type"]} for entry in error.errors()[:20]]
    return JSONResponse({"detail": told}, status_code=422)


async def refuse_large(_request: Request, error: Exception) -> JSONResponse:
    """Say how many samples a request may hold (413)."""
    assert isinstance(error, TooManyItems)
    return refusal(413, str(error), max_request_items=error.max_items)


async def refuse_item(_request: Request, error: Exception) -> JSONResponse:
    """Describe what is wrong with a sample of a request, and name the sample (422)."""
    return refusal(422, str(error))


def items_of(request: RewardRequest) -> list[Item]:
    """Return the items of a request; without `responses`, each response is looked up inside its query."""
    return items_from(
        request.query, request.prompts, request.labels, responses=request.responses, image_scales=request.image_scales
    )


def reply_from(scores: Sequence[Score]) -> RewardReply:
    """Return the reply of one verifier or model."""
    return RewardReply(
        rewards=[score.reward for score in scores],
        scores=[score.score for score in scores],
        extra_logs=extra_logs_of(scores),
    )
