"""Progress of a command over rows, as lines on stderr, and the rows that it left out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from lmm_r1.data.messages import SkippedRow
from lmm_r1.data.reading import reasons

if TYPE_CHECKING:
    from lmm_r1.tools.batch import JobTotals

LINE_SECONDS = 10.0
SKIPPED_ROWS_CODE = 3


class ProgressLines:
    """Prints a line on stderr, at most one every few seconds."""

    def __init__(self) -> None:
        self._shown = time.perf_counter()

    def __call__(self, line: str, *, is_last: bool = False) -> None:
        """Args: is_last: print it in any case."""
        now = time.perf_counter()
        if is_last or now - self._shown >= LINE_SECONDS:
            self._shown = now
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def job_progress(what: str, *, total: int, done: int) -> Iterator[Callable[[JobTotals], None]]:
    """Yield the function that shows the totals of this session.

    Args:
        total: rows of the whole job.
        done: rows that earlier sessions finished.
    """
    began, show_line = time.perf_counter(), ProgressLines()

    def show(totals: JobTotals) -> None:
        finished, seconds = totals.rows + totals.skipped, time.perf_counter() - began
        left = (total - done - finished) * seconds / finished
        show_line(
            f"{what}: {done + finished}/{total} rows  {totals.tokens / seconds:,.0f} tokens/s  "
            f"{totals.skipped} skipped  {left:,.0f} s left",
            is_last=done + finished == total,
        )

    yield show


def report_skipped(prog: str, skipped: Sequence[SkippedRow], *, listed_in: str | None = None) -> NoReturn:
    """List rows that were left out on stderr and end the process with `SKIPPED_ROWS_CODE`.

    Args:
        listed_in: file that lists all of them, if only some are printed.
    """
    assert skipped, "a command without skipped rows ends as it is"
    rows = "1 row was" if len(skipped) == 1 else f"{len(skipped):,} rows were"
    print(f"{prog}: {rows} left out, and everything else was done:", file=sys.stderr)
    for line in reasons(skipped, listed_in=listed_in):
        print(f"  {line}", file=sys.stderr)
    raise SystemExit(SKIPPED_ROWS_CODE)
