"""Asks a language model for verdicts that the rule leaves open, within limits of time and attempts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import openai

from remote_rm.answers.extraction import final_answer
from remote_rm.llm_judge import Question, question_of, read_verdict
from remote_rm.service.access import is_local
from remote_rm.service.pool import QUICK_CHARS, VerifierPool
from remote_rm.verifier import Item, NotReady, Score

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge

logger = logging.getLogger(__name__)

KEY_ENV = "LLM_JUDGE_API_KEY"
"""The environment variable with the endpoint's key."""
DATABASE = "verdicts.sqlite"
ATTEMPTS = 3
REST_AFTER_FAILURES, REST_SECONDS = 8, 30.0
"""After so many failed questions in a row, the endpoint is asked one question in so many seconds."""


class Asker:
    """Asks an endpoint, and keeps its verdicts; belongs to the event loop that it is first used in."""

    def __init__(self, settings: LlmJudge) -> None:
        """Raise NotReady if no endpoint is given, or the folder cannot be used."""
        if not settings.judge_url or not settings.judge_model:
            raise NotReady("the verifier llm_judge asks a server: give its --judge-url and the --judge-model there")
        self._key = os.environ.get(KEY_ENV, "").strip()
        self._settings = settings
        body = {"temperature": 0.0, **json.loads(settings.judge_body)}
        self._body = {name: value for name, value in body.items() if value is not None}
        self._slots = asyncio.Semaphore(settings.judge_concurrency)
        self._failures = 0
        self._rests_until = 0.0
        try:
            Path(settings.judge_folder).mkdir(parents=True, exist_ok=True)
            self._verdicts = sqlite3.connect(Path(settings.judge_folder) / DATABASE, timeout=10, isolation_level=None)
            self._verdicts.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, is_right INTEGER)")
        except (OSError, sqlite3.Error) as error:
            raise NotReady(
                f"--judge-folder {settings.judge_folder} cannot be used ({error}); name a folder that can be written to"
            ) from error
        self._client = openai.AsyncOpenAI(
            base_url=settings.judge_url,
            # Without a key of its own, that of another service must not be sent.
            api_key=self._key or "none",
            timeout=settings.judge_deadline_seconds / ATTEMPTS,
            max_retries=ATTEMPTS - 1,
            # What runs on this machine needs no proxy. A redirect could send the key elsewhere.
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=not is_local(urlsplit(settings.judge_url).hostname or ""), follow_redirects=False
            ),
        )

    async def check(self) -> None:
        """Raise NotReady if the endpoint cannot be asked."""
        try:
            await self._client.with_options(max_retries=0).models.list()
        except (openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise NotReady(
                f"--judge-url {self._settings.judge_url}: it cannot be asked: {self._told(error)}; start the server or "
                f"correct the address, and put its key, if it wants one, into the environment variable {KEY_ENV}"
            ) from error
        except openai.OpenAIError:
            # Not every server lists its models.
            pass

    async def close(self) -> None:
        """Close the connections and the records."""
        await self._client.close()
        self._verdicts.close()

    async def verdict(self, question: Question) -> bool | None:
        """Return whether the answer is right; None if the judge failed."""
        key, code = question.key(model=self._settings.judge_model), f"c{secrets.token_hex(8)}"
        async with self._slots:
            try:
                kept = self._verdicts.execute("SELECT is_right FROM verdicts WHERE key = ?", (key,)).fetchone()
                if kept is not None:
                    return bool(kept[0])
                if self._failures >= REST_AFTER_FAILURES and time.monotonic() < self._rests_until:
                    return None
                self._rests_until = time.monotonic() + REST_SECONDS
                asking = self._client.chat.completions.create(
                    model=self._settings.judge_model,
                    messages=question.messages(code=code),  # type: ignore[arg-type]
                    extra_body=self._body,
                )
                reply = await asyncio.wait_for(asking, timeout=self._settings.judge_deadline_seconds)
                # An endpoint that replies is well: an answer that confuses the judge must not keep others from it.
                self._failures = 0
                is_right = read_verdict(str(reply.choices[0].message.content), code=code)
                self._verdicts.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (key, is_right))
                return is_right
            except (asyncio.TimeoutError, openai.OpenAIError) as error:
                self._failures += 1
                told = self._told(error)
            except (AttributeError, LookupError, TypeError, ValueError, sqlite3.Error) as error:
                told = self._told(error)
            logger.warning("no verdict, so the rule judges: %s", told)
            return None

    def _told(self, error: Exception) -> str:
        """One short line without the key, which some servers repeat."""
        told = f"{type(error).__name__}: {error}"
        return " ".join((told.replace(self._key, "***") if self._key else told).split())[:300]


class AskingJudge(VerifierPool):
    """The rule's pool, and a judge who is asked about what the rule does not take for right."""

    _verifier: LlmJudge
    _asker: Asker | None = None

    async def start(self) -> None:
        """Try the judge and start the rule's workers; raises RuntimeError, NotReady if a user can mend it."""
        self._asker = Asker(self._verifier)
        await self._asker.check()
        await super().start()

    async def stop(self) -> None:
        """End the workers and close the connections."""
        await super().stop()
        if self._asker is not None:
            await self._asker.close()
        self._asker = None

    async def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; what is the same is asked once."""
        by_rule, asker = await super().judge(items), self._asker
        assert asker is not None, "a judge is started first"
        asked: dict[int, Question] = {}
        for place, (item, score) in enumerate(zip(items, by_rule, strict=True)):
            if score.score != 1.0 and (answer := final_answer(item.response[-QUICK_CHARS:]) or "").strip():
                asked[place] = question_of(item, answer=answer)
        questions = list(dict.fromkeys(asked.values()))
        self.waiting += len(questions)
        try:
            verdicts = dict(zip(questions, await asyncio.gather(*map(asker.verdict, questions)), strict=True))
        finally:
            self.waiting -= len(questions)
        self.counts.failed += list(verdicts.values()).count(None)
        found = {place: verdicts[question] for place, question in asked.items()}
        return [
            self._verifier.decided(score, found.get(place), is_asked=place in asked)
            for place, score in enumerate(by_rule)
        ]
