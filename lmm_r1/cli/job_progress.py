"""Progress of a command over rows (a bar, or lines in a log), and the rows that it left out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from lmm_r1.data.messages import SkippedRow
from lmm_r1.data.reading import reasons

if TYPE_CHECKING:
    from lmm_r1.batch import JobTotals

LINE_SECONDS = 10.0
SKIPPED_ROWS_CODE = 3


@contextlib.contextmanager
def job_progress(what: str, *, total: int, done: int) -> Iterator[Callable[[JobTotals], None]]:
    """Yield the function that shows the totals of this session on stderr.

    Args:
        total: rows of the whole job.
        done: rows that earlier sessions finished.
    """
    console = Console(stderr=True)
    yield from (
        _bar(what, total=total, done=done, console=console) if console.is_terminal else _lines(what, total, done)
    )


def _bar(what: str, *, total: int, done: int, console: Console) -> Iterator[Callable[[JobTotals], None]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows  {task.fields[speed]}  {task.fields[skipped]}ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, completed=done, speed="", skipped="")
        began = time.perf_counter()

        def show(totals: JobTotals) -> None:
            progress.update(
                task,
                completed=done + totals.rows + totals.skipped,
                speed=f"{totals.tokens / (time.perf_counter() - began):,.0f} tokens/s",
                skipped=f"{totals.skipped} skipped  " if totals.skipped else "",
            )

        yield show


def _lines(what: str, total: int, done: int) -> Iterator[Callable[[JobTotals], None]]:
    began = shown = time.perf_counter()

    def show(totals: JobTotals) -> None:
        nonlocal shown
        now = time.perf_counter()
        finished = totals.rows + totals.skipped
        if now - shown < LINE_SECONDS and done + finished < total:
            return
        shown = now
        left = (total - done - finished) * (now - began) / finished
        print(
            f"{what}: {done + finished}/{total} rows  {totals.tokens / (now - began):,.0f} tokens/s  "
            f"{totals.skipped} skipped  {left:,.0f} s left",
            file=sys.stderr,
            flush=True,
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
