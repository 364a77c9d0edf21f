"""Rows as they are shown: with what an environment adds to their prompt."""

from __future__ import annotations

from dataclasses import replace

from lmm_r1.data.messages import Part, Row
from lmm_r1.errors import UserError


def with_parts(row: Row, parts: tuple[Part, ...]) -> Row:
    """The row with parts added to its last turn of the user; raises UserError where it has none."""
    places = [place for place, message in enumerate(row.messages) if message.role == "user"]
    if not places:
        raise UserError(
            f"{row.location}: the prompt has no turn of the user, and this environment adds to it; write one"
        )
    last = row.messages[places[-1]]
    changed = replace(last, parts=last.parts + parts)
    return replace(row, messages=(*row.messages[: places[-1]], changed, *row.messages[places[-1] + 1 :]))
