"""The HTTP application: POST /get_reward in OpenRLHF's protocol, and GET /health."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from remote_rm.pool import Judgement, VerifierPool
from remote_rm.protocol import RewardReply, RewardRequest
from remote_rm.response import find_response
from remote_rm.verifier import Item, Verifier

SERVICE_NAME = "lmm-r1 reward server"


def create_app(verifier: Verifier, *, workers: int, item_timeout_seconds: float) -> FastAPI:
    """Return the application; its worker processes run from startup to shutdown."""
    pool = VerifierPool(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        try:
            yield
        finally:
            await pool.stop()

    app = FastAPI(title=SERVICE_NAME, lifespan=lifespan)

    @app.post("/get_reward")
    async def get_reward(request: RewardRequest) -> RewardReply:
        check_labels(request.labels, verifier=verifier)
        return reply_from(await pool.judge(items_of(request)))

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "service": SERVICE_NAME, "verifier": verifier.name, **vars(pool.counts)}

    return app


def check_labels(labels: Sequence[str], *, verifier: Verifier) -> None:
    """Refuse a request with an unusable label (422), naming its place."""
    for index, label in enumerate(labels):
        try:
            verifier.check_label(label)
        except ValueError as error:
            raise HTTPException(status_code=422, detail=f"labels[{index}]: {error}") from error


def items_of(request: RewardRequest) -> list[Item]:
    """Return the items of a request; without `responses`, each response is looked up inside its query."""
    responses = request.responses
    if responses is None:
        responses = [
            find_response(query, prompt=prompt) for query, prompt in zip(request.query, request.prompts, strict=True)
        ]
    return [
        Item(prompt=prompt, response=response, label=label)
        for prompt, response, label in zip(request.prompts, responses, request.labels, strict=True)
    ]


def reply_from(judgements: Sequence[Judgement]) -> RewardReply:
    """Return the reply; `timed_out` (0.0 or 1.0) stands beside the parts of the scores in `extra_logs`."""
    names = judgements[0].score.parts if judgements else ()
    logs = {name: [judgement.score.parts[name] for judgement in judgements] for name in names}
    logs["timed_out"] = [float(judgement.timed_out) for judgement in judgements]
    return RewardReply(
        rewards=[judgement.score.reward for judgement in judgements],
        scores=[judgement.score.score for judgement in judgements],
        extra_logs=logs,
    )
