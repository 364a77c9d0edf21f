"""A reward model behind HTTP: the protocol, limits and errors are those of every reward server in `remote_rm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI

from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.scoring.reward_judge import RewardModelJudge, items_of_request
from remote_rm.service.app import create_service
from remote_rm.service.judge import ServiceLimits
from remote_rm.service.server import ListeningOptions, serve_app

if TYPE_CHECKING:
    from lmm_r1.scoring.reward_model import RewardModel


def create_app(
    load: Callable[[], RewardModel],
    *,
    media: MediaAccess,
    limits: ServiceLimits,
    token: str | None,
    log_sample_share: float,
) -> FastAPI:
    """Return the application of the model that `load` returns, whose errors are raised here."""
    return create_service(
        RewardModelJudge(load, media=media, max_queued_items=limits.max_queued_items),
        items_of_request=items_of_request,
        limits=limits,
        token=token,
        log_sample_share=log_sample_share,
        frees_abandoned=True,
    )


def serve(load: Callable[[], RewardModel], *, media: MediaAccess, options: ListeningOptions) -> None:
    """Serve until SIGINT or SIGTERM; exits with code 1 if it cannot listen, and raises what `load` raises."""

    def make_app(token: str | None) -> FastAPI:
        return create_app(
            load, media=media, limits=options.limits, token=token, log_sample_share=options.log_sample_share
        )

    serve_app(make_app, options=options)
