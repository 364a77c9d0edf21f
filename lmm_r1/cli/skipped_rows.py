"""How a command ends that did its work but had to leave rows out: it lists them, and its exit code says so."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from lmm_r1.data.files import SkippedRow

SKIPPED_ROWS_CODE = 3
MAX_LISTED = 20


def report_skipped(prog: str, skipped: Sequence[SkippedRow], *, listed_in: str | None = None) -> NoReturn:
    """List rows that were left out on stderr and end the process with `SKIPPED_ROWS_CODE`.

    Args:
        listed_in: where all of them are listed, should they be more than `MAX_LISTED`.
    """
    assert skipped, "a command without skipped rows ends as it is"
    rows = "1 row was" if len(skipped) == 1 else f"{len(skipped):,} rows were"
    print(f"{prog}: {rows} left out, and everything else was done:", file=sys.stderr)
    for row in skipped[:MAX_LISTED]:
        print(f"  {' '.join(row.reason.split())}", file=sys.stderr)
    if len(skipped) > MAX_LISTED:
        where = f"; {listed_in} lists them all" if listed_in else ""
        print(f"  and {len(skipped) - MAX_LISTED:,} more{where}", file=sys.stderr)
    raise SystemExit(SKIPPED_ROWS_CODE)
