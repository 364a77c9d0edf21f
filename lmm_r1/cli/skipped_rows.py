"""How a command ends that left rows out: it lists them on stderr and has an exit code of its own."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from lmm_r1.data.files import SkippedRow

SKIPPED_ROWS_CODE = 3
LISTED = 20


def report_skipped(prog: str, skipped: Sequence[SkippedRow]) -> NoReturn:
    """List rows that were left out, the first of many, and end the process with code 3."""
    count = len(skipped)
    print(f"{prog}: {count} {'row was' if count == 1 else 'rows were'} left out:", file=sys.stderr)
    for row in skipped[:LISTED]:
        print(f"  {row.reason}", file=sys.stderr)
    if count > LISTED:
        print(f"  and {count - LISTED} more", file=sys.stderr)
    raise SystemExit(SKIPPED_ROWS_CODE)
