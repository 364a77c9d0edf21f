"""Pairs of responses to one prompt, of which one is preferred: read from row files, each with its place."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Message, Row
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.errors import UserError

MARGIN = "margin"


@dataclass(frozen=True, kw_only=True)
class PreferenceRow:
    """A prompt with a better and a worse continuation."""

    messages: tuple[Message, ...]
    """The prompt, which both have in common."""
    chosen: tuple[Message, ...]
    """The better continuation: usually one message of the assistant."""
    rejected: tuple[Message, ...]
    """The worse one."""
    margin: float | None
    """By how much the chosen one is better, where the row says so."""
    location: str
    """File and line, for error messages."""
    datasource: str = "default"
    plain: bool = False
    """Its texts go to the tokenizer as they stand, without the chat template; it has no images and videos then."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the record."""

    @property
    def sides(self) -> tuple[Row, Row]:
        """The conversation that ends with the chosen continuation, and that with the rejected one."""
        chosen, rejected = (
            Row(
                messages=(*self.messages, *side),
                answer="",
                datasource=self.datasource,
                location=self.location,
                plain=self.plain,
            )
            for side in (self.chosen, self.rejected)
        )
        return chosen, rejected


def load_preference_rows(
    source: str, *, split: str = "train", reading: RowReading = AS_THEY_ARE
) -> list[PreferenceRow]:
    """Return the pairs of a row file or dataset.

    Raises:
        UserError: it cannot be read, or a row has no prompt, lacks a response, or has the same one twice.
    """
    if reading.format is None:
        reading = replace(reading, format="preference")
    file = read_row_file(source, split=split, reading=reading, answer_required=False)
    return [_pair(row) for row in file.rows.values()]


def _pair(row: Row) -> PreferenceRow:
    if row.response is None or row.rejected is None:
        raise UserError(
            f"{row.location}: no pair of responses; a row needs one in the column chosen and one in the column rejected "
            "(--data.chosen_key and --data.rejected_key name others)"
        )
    if row.response == row.rejected:
        raise UserError(f"{row.location}: chosen and rejected are the same response; leave the row out")
    columns = dict(row.columns)
    return PreferenceRow(
        messages=row.messages,
        chosen=(row.response,),
        rejected=(row.rejected,),
        margin=_margin(columns.pop(MARGIN, None), location=row.location),
        location=row.location,
        datasource=row.datasource,
        plain=row.plain,
        columns=columns,
    )


def _margin(value: Any, *, location: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{location}: the margin {value!r} must be a number")
    return float(value)
