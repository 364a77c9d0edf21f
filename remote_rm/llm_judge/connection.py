"""The asker that a verifier's settings describe, and in what words one that cannot be started is told of."""

import json
import os
import sqlite3
from typing import TYPE_CHECKING

from remote_rm.llm_judge.asker import Asker, Patience
from remote_rm.llm_judge.endpoint import ChatEndpoint, EndpointSettings, Refused
from remote_rm.llm_judge.ledger import Budget, Ledger
from remote_rm.service.judge import NotReady

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge

KEY_ENV = "LLM_JUDGE_API_KEY"
"""Where the key is looked for that the endpoint is sent, unless a flag names another variable."""


def asker_of(settings: "LlmJudge") -> Asker:
    """Return the asker, which is not started; raises NotReady where no endpoint or no key is given."""
    if not settings.judge_url or not settings.judge_model:
        raise NotReady("the verifier llm_judge asks a server: give its --judge-url and the --judge-model there")
    return Asker(
        model=settings.judge_model,
        endpoint=ChatEndpoint(
            EndpointSettings(
                url=settings.judge_url,
                model=settings.judge_model,
                api_key=_api_key(settings.judge_key_env),
                connections=settings.judge_concurrency,
                timeout_seconds=settings.judge_timeout_seconds,
                body=json.loads(settings.judge_body),
            )
        ),
        ledger=Ledger(
            settings.judge_folder,
            budget=Budget(max_requests=settings.judge_max_requests, max_tokens=settings.judge_max_tokens),
        ),
        patience=Patience(
            attempts=settings.judge_attempts,
            deadline_seconds=settings.judge_deadline_seconds,
            concurrency=settings.judge_concurrency,
        ),
        limits=f"--judge-max-requests {settings.judge_max_requests}, --judge-max-tokens {settings.judge_max_tokens}, "
        f"counted in --judge-folder {settings.judge_folder}",
    )


async def start(asker: Asker, settings: "LlmJudge") -> None:
    """Start an asker; raises NotReady where its endpoint cannot be asked, or its records cannot be kept."""
    try:
        await asker.start()
    except Refused as error:
        raise NotReady(
            f"--judge-url {settings.judge_url}: {error}; start the server or correct the address, and put its key, if it "
            f"wants one, into the environment variable {settings.judge_key_env or KEY_ENV}"
        ) from error
    except (OSError, sqlite3.Error) as error:
        raise NotReady(
            f"--judge-folder {settings.judge_folder} cannot be used ({error}); name a folder that can be written to, on a "
            "disk of this machine"
        ) from error


async def check_ready(settings: "LlmJudge") -> None:
    """Raise NotReady where an asker with these settings cannot be started."""
    asker = asker_of(settings)
    try:
        await start(asker, settings)
    finally:
        await asker.stop()


def _api_key(variable: str | None) -> str | None:
    key = os.environ.get(variable or KEY_ENV, "").strip()
    if variable is not None and not key:
        raise NotReady(f"--judge-key-env {variable}: this environment variable is not set or empty; export the key")
    return key or None
