"""The models behind `--endpoint`: their settings from the flags, and whether the server can be reached."""

from __future__ import annotations

import contextlib
import os

from lmm_r1.config.evaluate import EvaluateConfig, endpoint_fields
from lmm_r1.errors import UserError
from lmm_r1.generation.answer_log import AnswerLog
from lmm_r1.generation.endpoint import EndpointEngine, EndpointSettings


def remote_models(config: EvaluateConfig, *, log: AnswerLog) -> list[EndpointSettings]:
    """Return the settings of each `--model`; none where there is no `--endpoint`.

    Raises UserError where the key is missing, the server cannot be reached or it refuses the key.
    """
    if config.endpoint is None:
        return []
    models = [
        EndpointSettings(
            url=config.endpoint,
            model=model,
            api_key=_api_key(config.api_key_env),
            concurrency=config.endpoint_concurrency,
            timeout_seconds=config.endpoint_timeout,
            attempts=config.endpoint_attempts,
            body=endpoint_fields(config),
        )
        for model in config.model
    ]
    with contextlib.closing(EndpointEngine(models[0], log=log)) as engine:
        engine.check()
    return models


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"--api_key_env {variable}: this environment variable is not set or empty; export the key")
    return key
