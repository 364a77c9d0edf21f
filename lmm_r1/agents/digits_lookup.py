"""An environment in which the cells of a table of digits can be looked up: a tool that is always right, to learn to call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmm_r1.agents.environment import (
    Answered,
    Environment,
    Episode,
    RunningParts,
    Turn,
    is_right,
    label_of,
    with_parts,
)
from lmm_r1.data.messages import Row, TextPart
from lmm_r1.data.sample import CallOutcome
from lmm_r1.errors import UserError

TABLE_COLUMN = "table"
_CALL = re.compile(r"<lookup>(.*?)(?:</lookup>|\Z)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d+)?")
_NAMED = {name: re.compile(rf"{name}\D{{0,10}}?({_NUMBER.pattern})", re.IGNORECASE) for name in ("row", "col")}
_TOLD = (
    "You can look up one cell at a time: <lookup>row 2, column 3</lookup> tells you its digit. Rows and columns count from 1 "
    "at the top left. Write the result as <answer>12</answer>."
)


def look_up(row: int, column: int, shown: Row) -> str:
    """Look up the digit in one cell of the table.

    Args:
        row: which row, 1 for the topmost.
        column: which column, 1 for the leftmost.
        shown: the dataset row, whose column `table` holds the table.

    Raises:
        ValueError: there is no such cell.
    """
    table = shown.columns[TABLE_COLUMN]
    if not (1 <= row <= len(table) and 1 <= column <= len(table[0])):
        raise ValueError(
            f"there is no row {row}, column {column}: the table has {len(table)} rows and {len(table[0])} columns"
        )
    return str(table[row - 1][column - 1])


@dataclass(frozen=True, kw_only=True)
class DigitsLookup(Environment):
    """Turns that look up a cell, until one that does not: that is the answer.

    Parts of the reward: `accuracy` of the last turn, `tool_execution` (the share of calls that could be carried out; 0
    without any). Counted: `tool_calls`, `malformed_calls`.
    """

    name: ClassVar[str] = "digits-lookup"
    rewards: ClassVar[tuple[str, ...]] = ("accuracy", "tool_execution")
    counts: ClassVar[tuple[str, ...]] = ("tool_calls", "malformed_calls")
    stops: ClassVar[tuple[str, ...]] = ("</lookup>", "</answer>")

    def shown_row(self, row: Row) -> Row:
        """Return the row with how a cell is looked up."""
        return with_parts(row, (TextPart(f"\n{_TOLD}"),))

    @property
    def call_tags(self) -> tuple[str, ...]:
        """That of a look-up."""
        return ("lookup",)

    def derived(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """Return `used_tool`: whether a call was carried out."""
        return {"used_tool": float(counts["tool_calls"] > counts["malformed_calls"])}

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode; raises UserError where the row has no label or no table."""
        if not _is_table(row.columns.get(TABLE_COLUMN)):
            raise UserError(
                f'{row.location}: the column "{TABLE_COLUMN}" must be a list of rows of digits, all as long; '
                "`lmm-r1 make_task digits_table` writes such rows"
            )
        return _Looking(row)


class _Looking(Episode):
    def __init__(self, row: Row) -> None:
        self.row = row
        self.label = label_of(row)
        self.prefill = row.prefill
        self.calls = self.carried_out = 0
        self._parts = RunningParts()

    async def answer(self, turn: Turn) -> Answered:
        calls = list(_CALL.finditer(turn.text))
        if not calls or "<answer>" in turn.text[calls[-1].end() :]:
            return Answered(rewards=self._pay(is_right(turn.text, self.label)))
        self.calls += 1
        try:
            row, column = read_cell(calls[-1][1])
            told = f"Row {row}, column {column}: {look_up(row, column, self.row)}"
            self.carried_out += 1
            call = CallOutcome(tool="lookup", outcome="done")
        except ValueError as error:
            told = f"Nothing was looked up: {error}."
            call = CallOutcome(tool="lookup", outcome="malformed", problem=str(error))
        return Answered(
            shown=(TextPart(told),),
            prefill=self.prefill,
            rewards=self._pay(False),
            counts={"tool_calls": 1, "malformed_calls": int(call.outcome == "malformed")},
            calls=(call,),
        )

    def _pay(self, right: bool) -> dict[str, float]:
        share = self.carried_out / self.calls if self.calls else 0.0
        return self._parts.pay({"accuracy": float(right), "tool_execution": share})


def read_cell(text: str) -> tuple[int, int]:
    """The row and column that a call names: `2, 3`, `row 2, column 3`, `{"column": 3, "row": 2}`, in that order each.

    Raises ValueError, with what is wrong, where it does not name one of each in whole numbers.
    """
    named = [pattern.search(text) for pattern in _NAMED.values()]
    numbers = [match[1] for match in named if match is not None]
    if len(numbers) < 2:
        numbers = _NUMBER.findall(text)
    if len(numbers) != 2:
        raise ValueError(
            f"a call names one row and one column, as in row 2, column 3, and {len(numbers)} numbers were found"
        )
    if any("." in number for number in numbers):
        raise ValueError(
            f"rows and columns are whole numbers, and {' and '.join(number[:20] for number in numbers)} were found"
        )
    row, column = map(int, numbers)
    return row, column


def _is_table(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return False
    rows = [row for row in value if isinstance(row, Sequence) and not isinstance(row, str | bytes) and row]
    whole = all(isinstance(digit, int) and not isinstance(digit, bool) for row in rows for digit in row)
    return whole and len(rows) == len(value) and len({len(row) for row in rows}) == 1
