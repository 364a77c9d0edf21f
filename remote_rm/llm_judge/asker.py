"""Asks a language model for verdicts that the rule leaves open, within limits of time, attempts and money.

Verdicts are read from the folder if it has them. Coroutines of the event loop wait for the network: workers have a time
limit that is meant for sympy, and the pool gives only the rule's score.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from remote_rm.answers.extraction import final_answer
from remote_rm.llm_judge import MalformedVerdict, Question, question_of, read_verdict
from remote_rm.llm_judge.endpoint import Budget, ChatEndpoint, Ledger, Refused, TryAgain
from remote_rm.service.pool import QUICK_CHARS, VerifierPool
from remote_rm.verifier import STOPPING, Item, NotReady, PoolUnavailable, Score, check_room

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge


logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; doubled with each further one, with jitter."""
MAX_PAUSE_SECONDS = 30.0
REST_AFTER_FAILURES = 8
"""After this many failed questions in a row the endpoint is not asked for a while."""
REST_SECONDS = 30.0
"""For how long, but for one question that finds out whether it is back."""


class NoVerdict(Exception):
    """The judge has not judged; the rule is to."""

    def __init__(self, reason: str, *, is_used_up: bool = False) -> None:
        super().__init__(reason)
        self.is_used_up = is_used_up
        """For want of budget; the judge has not failed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judge's verdict on one question."""

    is_right: bool
    is_new: bool
    """Asked for by this caller, not found."""


class Asker:
    """Asks each question once, whoever wants to know; belongs to the event loop that it is first used in.

    Its own thread writes its records, so that a slow disk does not block the loop.
    """

    def __init__(self, settings: LlmJudge) -> None:
        """Raise NotReady if no endpoint or no key is given."""
        if not settings.judge_url or not settings.judge_model:
            raise NotReady("the verifier llm_judge asks a server: give its --judge-url and the --judge-model there")
        self._settings = settings
        self._endpoint = ChatEndpoint(settings, api_key=_api_key(settings.judge_key_env))
        budget = Budget(max_requests=settings.judge_max_requests, max_tokens=settings.judge_max_tokens)
        self._ledger = Ledger(settings.judge_folder, budget=budget)
        self._limits = (
            f"--judge-max-requests {settings.judge_max_requests}, --judge-max-tokens {settings.judge_max_tokens}, "
            f"counted in --judge-folder {settings.judge_folder}"
        )
        self._slots = asyncio.Semaphore(settings.judge_concurrency)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge records")
        self._flights: dict[str, _Flight] = {}
        self._rest = Rest()
        self._resumes_at = 0.0
        self._used_up = False

    @property
    def is_used_up(self) -> bool:
        """Whether the budget is used up; verdicts in the folder are still returned."""
        return self._used_up

    async def start(self) -> None:
        """Open the records and try the endpoint; raises NotReady if one of them cannot be used."""
        settings = self._settings
        try:
            await self._recorded(self._ledger.open)
            await self._endpoint.check()
            if not await self._recorded(self._ledger.has_room):
                await self._note_used_up()
        except Refused as error:
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
        """Cancel open questions, and close connections and records."""
        for flight in list(self._flights.values()):
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in self._flights.values()), return_exceptions=True)
        await self._endpoint.close()
        await self._recorded(self._ledger.close)
        self._thread.shutdown()

    async def verdict(self, question: Question) -> Verdict:
        """Return the verdict; raises NoVerdict if there is none, and sqlite3.Error.

        The same question is under way once: those who want to know wait for one answer, and it is given up with the last
        of them.
        """
        key = question.key(model=self._settings.judge_model)
        flight = self._flights.get(key)
        is_first = flight is None
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.ensure_future(self._found(key, question)))
        flight.waiting += 1
        try:
            verdict = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                flight.task.cancel()
                self._flights.pop(key, None)
        return verdict if is_first else replace(verdict, is_new=False)

    async def disagree(self, record: dict[str, object]) -> None:
        """Keep a record of a verdict that is not the rule's."""
        try:
            await self._recorded(partial(self._ledger.disagree, record))
        except OSError as error:
            logger.warning("a disagreement of the judge and the rule was not written: %s", error)

    async def _found(self, key: str, question: Question) -> Verdict:
        kept = await self._recorded(partial(self._ledger.verdict, key))
        if kept is not None:
            return Verdict(is_right=kept, is_new=False)
        if self._used_up:
            raise NoVerdict("the budget is used up", is_used_up=True)
        if not self._rest.admits():
            raise NoVerdict("the judge is left alone after failures")
        is_right = await self._asked(question)
        await self._recorded(partial(self._ledger.keep, key, is_right))
        return Verdict(is_right=is_right, is_new=True)

    async def _asked(self, question: Question) -> bool:
        """Ask until there is a verdict; raises NoVerdict, and logs the reason."""
        try:
            is_right = await asyncio.wait_for(self._attempts(question), timeout=self._settings.judge_deadline_seconds)
        except (asyncio.TimeoutError, TryAgain, Refused) as error:
            late = f"no verdict within {self._settings.judge_deadline_seconds:g} s"
            reason = late if isinstance(error, asyncio.TimeoutError) else str(error)
            self._rest.failed()
            logger.warning("the judge gave no verdict, the rule judges: %s", reason)
            raise NoVerdict(reason) from error
        except MalformedVerdict as error:
            # The endpoint is well; an answer that confuses the judge must not keep others from it.
            self._rest.succeeded()
            logger.info("the judge gave no verdict, the rule judges: %s", error)
            raise NoVerdict(str(error)) from error
        self._rest.succeeded()
        return is_right

    async def _attempts(self, question: Question) -> bool:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._slots:
                    await asyncio.sleep(max(0.0, self._resumes_at - time.monotonic()))
                    return await self._attempt(question)
            except TryAgain as failure:
                # It holds for all that it asks for patience.
                self._resumes_at = max(self._resumes_at, time.monotonic() + failure.wait_seconds)
                if attempt == self._settings.judge_attempts:
                    raise
            except MalformedVerdict:
                if attempt == self._settings.judge_attempts:
                    raise
            longest = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))

    async def _attempt(self, question: Question) -> bool:
        if not await self._recorded(self._ledger.reserve):
            await self._note_used_up()
            raise NoVerdict("the budget is used up", is_used_up=True)
        code = question.new_code()
        try:
            reply = await self._endpoint.reply(question.messages(code=code))
        except (TryAgain, Refused) as failure:
            if isinstance(failure, Refused) or not failure.is_paid:
                await self._recorded(self._ledger.give_back)
            raise
        await self._charge(reply.tokens)
        return read_verdict(reply.text, code=code)

    async def _charge(self, tokens: int | None) -> None:
        if tokens is not None:
            await self._recorded(partial(self._ledger.charge, tokens))
        elif self._ledger.budget.max_tokens is not None and not self._used_up:
            self._used_up = True
            logger.warning(
                "the judge's endpoint reports no usage, so that a budget of tokens (%s) cannot be kept: from now on the "
                "rule judges; limit the requests instead",
                self._limits,
            )

    async def _note_used_up(self) -> None:
        if self._used_up:
            return
        self._used_up = True
        spent = await self._recorded(self._ledger.spending)
        logger.warning(
            "the judge's budget is used up (%s; spent: %d requests, %d tokens): from now on the rule judges",
            self._limits,
            spent.requests,
            spent.tokens,
        )

    async def _recorded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Rest:
    """Tells whether a judge may be asked: after failures in a row, one question at a time finds out if it is back."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def admits(self) -> bool:
        """Return whether a question may be asked now; of a judge that rests, one in REST_SECONDS."""
        if self._failures < REST_AFTER_FAILURES:
            return True
        if time.monotonic() < self._until:
            return False
        self._until = time.monotonic() + REST_SECONDS
        return True

    def failed(self) -> None:
        """Note a question for which the endpoint failed."""
        self._failures += 1
        if self._failures == REST_AFTER_FAILURES:
            self._until = time.monotonic() + REST_SECONDS
            logger.warning(
                "the judge failed %d times in a row: the rule judges, and one question every %g s is tried",
                self._failures,
                REST_SECONDS,
            )

    def succeeded(self) -> None:
        """Note a reply."""
        if self._failures >= REST_AFTER_FAILURES:
            logger.warning("the judge is back, and judges again")
        self._failures = 0


@dataclass(eq=False)
class _Flight:
    """A question under way, and how many wait for its verdict."""

    task: asyncio.Task[Verdict]
    waiting: int = 0


KEY_ENV = "LLM_JUDGE_API_KEY"
"""Where the key is looked for that the endpoint is sent, unless a flag names another variable."""


async def check_ready(settings: LlmJudge) -> None:
    """Raise NotReady if an asker with these settings cannot be started."""
    asker = Asker(settings)
    try:
        await asker.start()
    finally:
        await asker.stop()


def _api_key(variable: str | None) -> str | None:
    key = os.environ.get(variable or KEY_ENV, "").strip()
    if variable is not None and not key:
        raise NotReady(f"--judge-key-env {variable}: this environment variable is not set or empty; export the key")
    return key or None


RETRY_AFTER_SECONDS = 5.0
"""The time after which a client should retry if too many items wait for the judge."""


class AskingJudge:
    """A `Judge` around the pool of the rule.

    Of one call, only as many items as there are connections are asked at a time, and each has its own deadline from then on:
    a large batch takes as long as it takes, and a single item never longer than its deadline.
    """

    def __init__(self, verifier: LlmJudge, *, rules: VerifierPool, max_queued_items: int) -> None:
        self.counts = rules.counts
        self._verifier = verifier
        self._rules = rules
        self._asker: Asker | None = None
        self._max_queued_items = max_queued_items
        self._open: set[asyncio.Task[list[Score]]] = set()
        self._waiting = 0
        self._busy = 0

    @property
    def name(self) -> str:
        return self._rules.name

    @property
    def waiting(self) -> int:
        """How many items wait for a worker of the rule, or for their turn to be put to the judge."""
        return self._rules.waiting + self._waiting - self._busy

    @property
    def busy(self) -> int:
        """How many items are with a worker of the rule, or are put to the judge."""
        return self._rules.busy + self._busy

    @property
    def workers(self) -> int:
        return self._rules.workers

    @property
    def worker_pids(self) -> list[int]:
        return self._rules.worker_pids

    async def start(self) -> None:
        """Try the judge and start the rule's workers; raises RuntimeError, NotReady if a user can mend it."""
        self._asker = Asker(self._verifier)
        try:
            await self._asker.start()
        except BaseException:
            await self.stop()
            raise
        await self._rules.start()

    def refuse(self) -> None:
        self._rules.refuse()
        self._give_up()

    async def stop(self) -> None:
        """End the workers and the requests; items in progress are dropped, and `judge` raises PoolUnavailable."""
        self._give_up()
        asker, self._asker = self._asker, None
        if asker is not None:
            await asker.stop()
        await self._rules.stop()

    def _give_up(self) -> None:
        for task in self._open:
            task.cancel()

    async def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; cancelled, it gives up what only it has asked for.

        No item makes it raise: PoolUnavailable says that too many items wait, or that this service stops.
        """
        by_rule = await self._rules.judge(items)
        is_open = [self._verifier.judge_always or score.score != 1.0 for score in by_rule]
        if any(is_open):
            check_room(
                waiting=self._waiting,
                more=sum(is_open),
                max_queued_items=self._max_queued_items,
                retry_after_seconds=RETRY_AFTER_SECONDS,
                what="items wait for the judge",
            )
        task = asyncio.ensure_future(self._judged(items, by_rule, is_open))
        self._open.add(task)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            self._open.discard(task)
        if task.cancelled():
            raise PoolUnavailable(STOPPING, retry_after_seconds=1)
        return task.result()

    async def _judged(self, items: Sequence[Item], by_rule: Sequence[Score], is_open: Sequence[bool]) -> list[Score]:
        asker = self._asker = self._asker or Asker(self._verifier)
        turns = asyncio.Semaphore(self._verifier.judge_concurrency)

        async def in_turn(item: Item, score: Score) -> Score:
            async with turns:
                self._busy += 1
                try:
                    return await self._score(item, score, asker=asker)
                finally:
                    self._busy -= 1

        asked = [
            in_turn(item, score) for item, score, is_asked in zip(items, by_rule, is_open, strict=True) if is_asked
        ]
        self._waiting += len(asked)
        try:
            answers = iter(await asyncio.gather(*asked))
        finally:
            self._waiting -= len(asked)
        return [
            next(answers) if is_asked else self._unasked(score, asker=asker)
            for score, is_asked in zip(by_rule, is_open, strict=True)
        ]

    def _unasked(self, by_rule: Score, *, asker: Asker) -> Score:
        return self._verifier.marked(by_rule, judged_by_rule=float(asker.is_used_up))

    async def _score(self, item: Item, by_rule: Score, *, asker: Asker) -> Score:
        settings = self._verifier
        is_long = len(item.response) > QUICK_CHARS
        answer = await asyncio.to_thread(final_answer, item.response) if is_long else final_answer(item.response)
        if answer is None or not answer.strip():
            return self._unasked(by_rule, asker=asker)
        question = question_of(
            item,
            answer=answer,
            max_question_chars=settings.judge_max_question_chars,
            max_answer_chars=settings.judge_max_answer_chars,
        )
        try:
            verdict = await asker.verdict(question)
        except NoVerdict as failure:
            return self._without_verdict(by_rule, failed=not failure.is_used_up)
        except sqlite3.Error as error:
            logger.warning("the judge's records in %s failed, the rule judges: %s", settings.judge_folder, error)
            return self._without_verdict(by_rule, failed=True)
        return await self._by_judge(question, by_rule, verdict, asker=asker)

    def _without_verdict(self, by_rule: Score, *, failed: bool) -> Score:
        self.counts.failed += failed
        return self._verifier.marked(by_rule, judged_by_rule=1.0, judge_failed=float(failed))

    async def _by_judge(self, question: Question, by_rule: Score, verdict: Verdict, *, asker: Asker) -> Score:
        # A rule that ran out of time has no result.
        disagrees = not by_rule.timed_out and verdict.is_right is not (by_rule.score == 1.0)
        if disagrees and verdict.is_new:
            record = {"rule": "right" if by_rule.score == 1.0 else "wrong", **vars(question)}
            await asker.disagree({"judge": "right" if verdict.is_right else "wrong", **record})
        return self._verifier.decided(by_rule, is_right=verdict.is_right, disagrees=disagrees)
