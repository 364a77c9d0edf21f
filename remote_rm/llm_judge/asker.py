"""Asks a language model for verdicts that the rule leaves open, within limits of time, attempts and money.

Coroutines wait for the network, not workers, whose time limit is meant for sympy.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tenacity

from remote_rm.answers.extraction import final_answer
from remote_rm.llm_judge import RIGHT, WRONG, MalformedVerdict, Question, question_of, read_verdict
from remote_rm.llm_judge.endpoint import KEY_ENV, ChatEndpoint, Ledger, RequestFailed
from remote_rm.service.pool import QUICK_CHARS, VerifierPool
from remote_rm.verifier import STOPPING, Item, NotReady, PoolUnavailable, Score, check_room

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
"""The longest pause before the second attempt, doubled with each further one, and its limit."""
REST_AFTER_FAILURES, REST_SECONDS = 8, 30.0
"""After so many failed questions in a row, the endpoint is asked one question in so many seconds."""


class UsedUp(Exception):
    """The budget is used up; the judge has not failed."""


class Asker:
    """Asks each question once, whoever wants to know; belongs to the event loop that it is first used in."""

    def __init__(self, settings: LlmJudge) -> None:
        """Raise NotReady if no endpoint or no key is given."""
        self._settings = settings
        self._endpoint = ChatEndpoint(settings)
        self._ledger = Ledger(settings.judge_folder, settings.judge_max_requests, settings.judge_max_tokens)
        self._slots = asyncio.Semaphore(settings.judge_concurrency)
        self._attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(
                lambda error: error.again if isinstance(error, RequestFailed) else isinstance(error, MalformedVerdict)
            ),
            stop=tenacity.stop_after_attempt(settings.judge_attempts),
            wait=tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_SECONDS, max=MAX_PAUSE_SECONDS),
            reraise=True,
        )
        self.under_way: dict[str, asyncio.Task[bool | None]] = {}
        self._waiting: Counter[str] = Counter()
        self._failures = 0
        self._rests_until = self._resumes_at = 0.0
        self.is_used_up = False

    async def check(self) -> None:
        """Raise NotReady if the records cannot be used, or the endpoint cannot be asked."""
        settings = self._settings
        try:
            self._ledger.open()
            self._ledger.close()
            await self._endpoint.check()
        except RequestFailed as error:
            raise NotReady(
                f"--judge-url {settings.judge_url}: {error}; start the server or correct the address, and put its key, if "
                f"it wants one, into the environment variable {settings.judge_key_env or KEY_ENV}"
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise NotReady(
                f"--judge-folder {settings.judge_folder} cannot be used ({error}); name a folder that can be written to, on "
                "a disk of this machine"
            ) from error

    async def stop(self) -> None:
        """Wait for the end of questions that were given up, and close the records."""
        await asyncio.gather(*self.under_way.values(), return_exceptions=True)
        self._ledger.close()

    async def verdict(self, question: Question, *, rule: bool | None) -> bool | None:
        """Return whether the answer is right, None if the judge has failed; raises UsedUp and PoolUnavailable.

        The same question is under way once: all who want to know wait for one answer, and it is given up with the last of
        them. A new verdict that is not the rule's, if it has one, is written to the file of disagreements.
        """
        key = question.key(model=self._settings.judge_model)
        if key not in self.under_way:
            self.under_way[key] = asyncio.create_task(self._found(key, question, rule=rule))
        task = self.under_way[key]
        self._waiting[key] += 1
        try:
            await asyncio.wait((task,))
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                task.cancel()
                del self._waiting[key], self.under_way[key]
        if task.cancelled():
            raise PoolUnavailable(STOPPING, retry_after_seconds=1)
        return task.result()

    async def _found(self, key: str, question: Question, *, rule: bool | None) -> bool | None:
        try:
            kept = self._ledger.verdict(key)
            if kept is not None:
                return kept
            if self.is_used_up:
                raise UsedUp
            if self._failures >= REST_AFTER_FAILURES and time.monotonic() < self._rests_until:
                return None
            self._rests_until = time.monotonic() + REST_SECONDS
            limit = self._settings.judge_deadline_seconds
            is_right: bool = await asyncio.wait_for(self._attempts(self._attempt, question), timeout=limit)
            self._failures = 0
            self._ledger.keep(key, is_right)
            if rule not in (None, is_right):
                words = (RIGHT, WRONG) if is_right else (WRONG, RIGHT)
                self._ledger.disagree({"judge": words[0], "rule": words[1], **vars(question)})
            return is_right
        except (asyncio.TimeoutError, RequestFailed, MalformedVerdict, OSError, sqlite3.Error) as error:
            # An endpoint that replies is well: an answer that confuses the judge must not keep others from it.
            self._failures = 0 if isinstance(error, MalformedVerdict) else self._failures + 1
            logger.warning("no verdict (%d failures in a row), so the rule judges: %r", self._failures, error)
            return None

    async def _attempt(self, question: Question) -> bool:
        async with self._slots:
            await asyncio.sleep(max(0.0, self._resumes_at - time.monotonic()))
            if not self._ledger.reserve():
                self._use_up("the judge's budget is used up")
                raise UsedUp
            code = question.new_code()
            try:
                reply, tokens = await self._endpoint.reply(question.messages(code=code))
            except RequestFailed as failure:
                # What the server asks for holds for all questions.
                self._resumes_at = max(self._resumes_at, time.monotonic() + failure.wait_seconds)
                if not failure.is_paid:
                    self._ledger.charge(-1, 0)
                raise
            if tokens is not None:
                self._ledger.charge(0, tokens)
            elif self._settings.judge_max_tokens is not None:
                self._use_up("the judge's endpoint reports no usage, so that its tokens cannot be limited")
            return read_verdict(reply, code=code)

    def _use_up(self, reason: str) -> None:
        if not self.is_used_up:
            self.is_used_up = True
            told = "%s (spent: %d requests, %d tokens; --judge-max-requests %s, --judge-max-tokens %s): the rule judges on"
            limits = self._settings.judge_max_requests, self._settings.judge_max_tokens
            logger.warning(told, reason, *self._ledger.spending(), *limits)


class AskingJudge(VerifierPool):
    """The rule's pool, and a judge who is asked about what the rule does not take for right.

    Of one call, only as many items as there are connections are asked at a time, and each has its own deadline from then on:
    a large batch takes as long as it takes, and a single item never longer than its deadline.
    """

    _verifier: LlmJudge
    _asker: Asker | None = None
    _asked = 0

    @property
    def busy(self) -> int:
        """How many items are with a worker of the rule, or are or will be put to the judge."""
        return super().busy + self._asked

    async def start(self) -> None:
        """Try the judge and start the rule's workers; raises RuntimeError, NotReady if a user can mend it."""
        self._asker = Asker(self._verifier)
        await self._asker.check()
        await super().start()

    def refuse(self) -> None:
        """Refuse new items from now on; `judge` raises PoolUnavailable, also for the items in progress."""
        super().refuse()
        for task in self._asker.under_way.values() if self._asker is not None else ():
            task.cancel()

    async def stop(self) -> None:
        """End the workers and the requests; items in progress are dropped, and `judge` raises PoolUnavailable."""
        self.refuse()
        if self._asker is not None:
            await self._asker.stop()
        self._asker = None
        await super().stop()

    async def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; cancelled, it gives up what only it has asked for.

        No item makes it raise: PoolUnavailable says that too many items wait, or that this service stops.
        """
        by_rule, asker = await super().judge(items), self._asker or Asker(self._verifier)
        self._asker = asker
        turns = asyncio.Semaphore(self._verifier.judge_concurrency)

        async def in_turn(place: int) -> Score | None:
            async with turns:
                if self._is_refusing:
                    raise PoolUnavailable(STOPPING, retry_after_seconds=1)
                return await self._score(items[place], by_rule[place], asker=asker)

        places = [at for at, score in enumerate(by_rule) if self._verifier.judge_always or score.score != 1.0]
        if places:
            room = {"max_queued_items": self._max_queued_items, "retry_after_seconds": 5}
            check_room(waiting=self._asked, more=len(places), what="items wait for the judge", **room)
        self._asked += len(places)
        try:
            decided = dict(zip(places, await asyncio.gather(*map(in_turn, places)), strict=True))
        finally:
            self._asked -= len(places)
        told = float(asker.is_used_up)
        return [decided.get(at) or self._verifier.marked(rule, judged_by_rule=told) for at, rule in enumerate(by_rule)]

    async def _score(self, item: Item, by_rule: Score, *, asker: Asker) -> Score | None:
        """Return the score with the judge's part in it; None if it was not to be asked."""
        settings, is_long = self._verifier, len(item.response) > QUICK_CHARS
        answer = await asyncio.to_thread(final_answer, item.response) if is_long else final_answer(item.response)
        if answer is None or not answer.strip():
            return None
        # A rule that ran out of time has no result.
        rule = None if by_rule.timed_out else by_rule.score == 1.0
        question = question_of(
            item,
            answer=answer,
            max_question_chars=settings.judge_max_question_chars,
            max_answer_chars=settings.judge_max_answer_chars,
        )
        try:
            is_right = await asker.verdict(question, rule=rule)
        except UsedUp:
            return None
        if is_right is None:
            self.counts.failed += 1
            return settings.marked(by_rule, judged_by_rule=1.0, judge_failed=1.0)
        return settings.decided(by_rule, is_right=is_right, disagrees=rule not in (None, is_right))
