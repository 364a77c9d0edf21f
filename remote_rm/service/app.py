"""The HTTP application: POST /get_reward in OpenRLHF's protocol, and GET /health."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from remote_rm.protocol import RewardReply, RewardRequest
from remote_rm.reward_function import items_from
from remote_rm.service.access import RequestGuard
from remote_rm.service.pool import judge_of
from remote_rm.verifier import (
    DEFAULT_LIMITS,
    WORKER_MEMORY_BYTES,
    Item,
    Judge,
    PoolUnavailable,
    ServiceLimits,
    UnusableItem,
    Verifier,
    check_labels,
    extra_logs_of,
)

SERVICE_NAME = "lmm-r1 reward server"
DESCRIPTION = """Rewards for reinforcement learning, in the protocol of OpenRLHF's remote reward models.

A request holds parallel lists, one entry per sample; the reply holds as many numbers, in the same order. A response that
cannot be judged within the time limit scores 0 and is reported as `timed_out`; it never fails the request it came with.
"""


def create_app(
    verifier: Verifier,
    *,
    workers: int,
    item_timeout_seconds: float,
    worker_memory_bytes: int = WORKER_MEMORY_BYTES,
    limits: ServiceLimits = DEFAULT_LIMITS,
    token: str | None = None,
) -> FastAPI:
    """Return the application of a verifier, whose worker processes run from startup to shutdown; see `create_service`."""

    def items_of_request(request: RewardRequest) -> list[Item]:
        items = items_from(
            request.query,
            request.prompts,
            request.labels,
            responses=request.responses,
            image_scales=request.image_scales,
        )
        check_labels(items, verifier=verifier)
        return items

    judge = judge_of(
        verifier,
        workers=workers,
        item_timeout_seconds=item_timeout_seconds,
        worker_memory_bytes=worker_memory_bytes,
    )
    return create_service(judge, items_of_request=items_of_request, limits=limits, token=token)


def create_service(
    judge: Judge,
    *,
    items_of_request: Callable[[RewardRequest], Sequence[Any]],
    limits: ServiceLimits,
    token: str | None,
) -> FastAPI:
    """Return the application around a judge, which runs from startup to shutdown.

    Args:
        items_of_request: what the judge is to judge, one item per sample; raises UnusableItem for a wrong request.
        token: what a request must bring as its bearer token; None asks for none.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await judge.start()
        try:
            yield
        finally:
            await judge.stop()

    app = FastAPI(title=SERVICE_NAME, description=DESCRIPTION, lifespan=lifespan)
    app.add_middleware(RequestGuard, token=token, max_bytes=limits.max_request_bytes)
    app.add_exception_handler(RequestValidationError, refuse_invalid)
    app.add_exception_handler(UnusableItem, lambda _request, error: refusal(422, str(error)))
    app.add_exception_handler(PoolUnavailable, lambda _request, error: refusal(503, str(error)))

    @app.post("/get_reward", summary="Judge samples", response_model=RewardReply)
    async def get_reward(request: RewardRequest) -> RewardReply | JSONResponse:
        """Judge every sample by what this service was started with."""
        if len(request.query) > limits.max_request_items:
            most = limits.max_request_items
            return refusal(413, f"a request may hold {most} samples; send the others in requests of their own")
        scores = await judge.judge(items_of_request(request))
        return RewardReply(
            rewards=[score.reward for score in scores],
            scores=[score.score for score in scores],
            extra_logs=extra_logs_of(scores),
        )

    @app.get("/health", summary="Is it up")
    async def health() -> dict[str, str | int]:
        """Answer as long as requests can be taken on, with what was judged so far; needs no token."""
        about: dict[str, str | int] = {"status": "ok", "service": SERVICE_NAME, "verifier": judge.name}
        return about | vars(judge.counts) | {"waiting": judge.waiting}

    return app


def refusal(status: int, detail: object) -> JSONResponse:
    """Return a reply without rewards, which says why."""
    return JSONResponse({"detail": detail}, status_code=status)


async def refuse_invalid(_request: Request, error: Exception) -> JSONResponse:
    """Describe what is wrong with a request (422), without sending it back: it may be large or not valid text."""
    assert isinstance(error, RequestValidationError)
    told = [{"loc": entry["loc"], "msg": entry["msg"], "type": entry["type"]} for entry in error.errors()[:20]]
    return refusal(422, told)
