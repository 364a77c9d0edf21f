"""Judges items by the rule first, and asks the judge if the rule does not settle them.

`Verifier.score` runs in one of a few worker processes, which would only wait, with a time limit that is meant for sympy. The
event loop must not block either. So coroutines of the event loop wait for the network, outside the pool but with the same
interface `Judge`; the pool gives the rule's score, in the server process or in a worker. Servers and callers without a loop (`BlockingPool`: evaluations, batch inference,
reward functions) have it alike, since both are made by `judge_of`.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from remote_rm.answers.extraction import final_answer
from remote_rm.llm_judge import Question
from remote_rm.llm_judge import asker as connection
from remote_rm.llm_judge import question_of
from remote_rm.llm_judge.asker import Asker, NoVerdict, Verdict
from remote_rm.service.judge import STOPPING, PoolUnavailable, check_room
from remote_rm.service.pool import QUICK_CHARS, VerifierPool
from remote_rm.verifier import Item, Score

if TYPE_CHECKING:
    from remote_rm.llm_judge_verifier import LlmJudge

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5.0
"""The time after which a client should retry if too many items wait for the judge."""


class AskingJudge:
    """A `Judge` around the pool of the rule.

    Of one call, only as many items as there are connections are asked at a time, and each has its own deadline from then on:
    a large batch takes as long as it takes, and a single item never longer than its deadline.
    """

    def __init__(self, verifier: "LlmJudge", *, rules: VerifierPool, max_queued_items: int) -> None:
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
        """The registered name of the verifier."""
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
        """How many worker processes of the rule are alive."""
        return self._rules.workers

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the rule's workers."""
        return self._rules.worker_pids

    async def start(self) -> None:
        """Try the judge and start the rule's workers; raises RuntimeError, NotReady if a user can mend it."""
        self._asker = connection.asker_of(self._verifier)
        try:
            await connection.start(self._asker, self._verifier)
        except BaseException:
            await self.stop()
            raise
        await self._rules.start()

    def refuse(self) -> None:
        """Refuse new items from now on; `judge` raises PoolUnavailable, also for the items in progress."""
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
        asker = self._asker = self._asker or connection.asker_of(self._verifier)
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
