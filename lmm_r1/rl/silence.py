"""Says which rows a run waits for where no group of responses has come from any engine for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray

from lmm_r1.data.messages import Row

logger = logging.getLogger(__name__)

_ROWS_NAMED = 8


class SilenceWatch:
    """Warns, from `with SilenceWatch(...)` to the end of the block, each time that nothing has come for a while.

    An engine whose process is held up as a whole, as by a regular expression that backtracks in a reward function, cannot
    say so itself.
    """

    def __init__(self, refs: Sequence[Any], rows: Sequence[Row], *, after_s: float) -> None:
        """Make a watch.

        Args:
            refs: of the groups that engines were asked for, in the order of `rows`; may grow.
        """
        self._refs = refs
        self._rows = rows
        self._after_s = after_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="silence watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        came = 0
        while not self._over.wait(self._after_s):
            if not (refs := list(self._refs)):
                continue
            ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
            if len(ready) == came and waiting:
                row_of = dict(zip(refs, self._rows, strict=False))
                named = "; ".join(row_of[ref].location for ref in waiting[:_ROWS_NAMED])
                more = f" and {len(waiting) - _ROWS_NAMED} more" if len(waiting) > _ROWS_NAMED else ""
                logger.warning(
                    "no group has come for %g s, and %d of %d are awaited (%s%s): if the responses are not that long, look "
                    "at what gives rewards, and at the engines with --logger.worker_logs",
                    self._after_s,
                    len(waiting),
                    len(refs),
                    named,
                    more,
                )
            came = len(ready)
