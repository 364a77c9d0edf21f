"""Responses judged by a verifier in worker processes, which are killed at a time limit, so that none can hang a command."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from lmm_r1.config.verifier_spec import verifier_from
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from remote_rm.service.judge import ServiceLimits
from remote_rm.service.pool import Judgement, VerifierPool
from remote_rm.verifier import Item

T = TypeVar("T")


class Judge:
    """A `VerifierPool` with an event loop in a thread of its own, from `with Judge(...)` to the end of the block."""

    def __init__(self, verifier_name: str, *, workers: int, item_timeout_seconds: float) -> None:
        """Take a verifier by the name that `verifier_from` reads; raises UserError for one that there is not.

        Args:
            item_timeout_seconds: an answer that is not judged by then is wrong, and its judgement says so.
        """
        self.name = verifier_name
        self._verifier = verifier_from(verifier_name)
        self._pool = VerifierPool(
            self._verifier,
            workers=workers,
            item_timeout_seconds=item_timeout_seconds,
            # One caller waits for its own items, however many: nobody else is to be told to come back later.
            limits=ServiceLimits(max_queued_items=sys.maxsize),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start the workers; raises RuntimeError where one does not come up."""
        assert self._loop is None, "a judge is entered once at a time"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"judge {self.name}", daemon=True)
        self._thread.start()
        try:
            self._run(self._pool.start())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers, whatever they are at."""
        try:
            self._run(self._pool.stop())
        finally:
            self._close()

    def check_labels(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row whose answer the verifier refuses as a label."""
        for row in rows:
            try:
                self._verifier.check_label(row.answer)
            except ValueError as error:
                raise UserError(f"{row.location}: {self.name} cannot judge by this row's answer: {error}") from error

    def judge(self, items: Sequence[Item]) -> list[Judgement]:
        """Return one judgement per item, in their order; one that cannot be judged in time is wrong."""
        return self._run(self._pool.judge(items))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "judge within `with Judge(...) as judge:`"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _close(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
