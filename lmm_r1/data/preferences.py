"""Rows of preference training: pairs of responses to one prompt."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmm_r1.data.files import RowFile, first_columns, found_records
from lmm_r1.data.formats import PREFERENCE_ROWS
from lmm_r1.data.formats.chats import chat_message
from lmm_r1.data.formats.row_format import Column, Columns, PairFields, Record, RowFormat, is_empty, text_of_number
from lmm_r1.data.known_keys import check_columns
from lmm_r1.data.media_access import media_roots
from lmm_r1.data.messages import (
    BadRows,
    ImagePart,
    Message,
    PreferenceRow,
    TextPart,
    VideoPart,
    images_of,
    videos_of,
)
from lmm_r1.data.reading import AS_THEY_ARE, RowReading, good_rows
from lmm_r1.data.row_parser import RecordParser, check_shown


class PairParser(RecordParser):
    """Reads a record with two responses."""

    def asked(self, value: Any, *, plain_template: str | None) -> tuple[tuple[Message, ...], bool]:
        """Return the prompt, which must end with a turn to answer, and whether it is plain text."""
        messages, plain = self.prompt(value, plain_template=plain_template)
        if messages[-1].role not in ("user", "tool"):
            self.fail(
                f'the prompt "{self.prompt_column}" ends with a turn of the role {messages[-1].role}; it must end with the '
                "turn to answer"
            )
        return messages, plain

    def continuation(self, column: Column) -> tuple[Message, ...]:
        """Return the turns of a response, of which the first and the last must be the assistant's; a text is one turn."""
        value = chat_message(column.value)
        if isinstance(value, (str, numbers.Number)) and not isinstance(value, bool):
            value = {"role": "assistant", "content": value if isinstance(value, str) else text_of_number(value)}
        turns = [value] if isinstance(value, Mapping) else value
        if is_empty(turns):
            self.fail(f'the field "{column.name}" is empty; fill it in')
        if isinstance(turns, bytes) or not isinstance(turns, Sequence):
            self.fail(f'"{column.name}" must be a text or a list of messages, not {type(turns).__name__}')
        messages = tuple(
            self.message(
                chat_message(turn),
                where=f'"{column.name}"{"" if len(turns) == 1 else f" message {number}"}',
                is_last=number == len(turns),
            )
            for number, turn in enumerate(turns, start=1)
        )
        if any(turn.loss is not None and turn.loss != (turn.role == "assistant") for turn in messages):
            self.fail(
                f'"{column.name}" has a mark that changes which turns are in the loss; every turn of the assistant is, so remove it'
            )
        if messages[0].role != "assistant" or messages[-1].role != "assistant":
            other = next(message.role for message in (messages[0], messages[-1]) if message.role != "assistant")
            self.fail(f'"{column.name}" must begin and end with a turn of the assistant, not of the role {other}')
        return messages

    def check_pair(self, chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
        """Raise UserError if two responses are equal, or only one of them has images or videos."""
        if _essence(chosen) == _essence(rejected):
            self.fail("chosen and rejected are equal, so neither is better; correct one of them, or leave the row out")
        for kind, of in (("image", images_of), ("video", videos_of)):
            counts = len(of(chosen)), len(of(rejected))
            if 0 in counts and counts != (0, 0):
                side = "chosen" if counts[0] else "rejected"
                self.fail(
                    f"the response {side} has {max(counts)} {kind}s and the other one none; put what both need into the "
                    "prompt, or on both sides"
                )

    def score(self, column: Column) -> float | None:
        """Return a number, None for an empty column."""
        if is_empty(column.value):
            return None
        number = math.nan
        if isinstance(column.value, str | numbers.Real) and not isinstance(column.value, bool):
            with suppress(ValueError, OverflowError):
                number = float(column.value)
        if not math.isfinite(number):
            text = repr(column.value)
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            self.fail(f'"{column.name}" is {shown}; it must be a finite number, or empty')
        return number

    def margin(self, given: Column, better: Column, worse: Column) -> float | None:
        """Return how much better the chosen response is: the given margin, else the difference of the scores."""
        margin, high, low = self.score(given), self.score(better), self.score(worse)
        name = f'"{given.name}"'
        if margin is None and high is not None and low is not None:
            margin, name = high - low, f'"{better.name}" minus "{worse.name}"'
        if margin is not None and margin < 0:
            self.fail(f"{name} is {margin:g}, so the rejected response would be better; swap the two, or correct it")
        return margin


def _essence(messages: Sequence[Message]) -> list[object]:
    """Return what two responses are compared by: roles, stripped texts, and media."""
    found: list[object] = []
    for message in messages:
        found.append(
            (message.role, "".join(part.text for part in message.parts if isinstance(part, TextPart)).strip())
        )
        found += [part for part in message.parts if isinstance(part, (ImagePart, VideoPart))]
    return found


def read_pairs(
    path: str,
    *,
    split: str = "train",
    max_rows: int | None = None,
    reading: RowReading = AS_THEY_ARE,
    check: Callable[[PreferenceRow], PreferenceRow] | None = None,
    bad_rows: BadRows = "stop",
    skip_by: str | None = None,
) -> RowFile[PreferenceRow]:
    """Return the first `max_rows` rows, validated, with local images and videos that exist.

    Args:
        check: returns the row as the command uses it; raises UserError for one that it cannot use.
        bad_rows: whether invalid records are an error, or are returned as `skipped`.
        skip_by: the flag that leaves out bad rows, for messages; None if the command has none.

    Raises:
        UserError: the file is missing, empty or not readable, several formats fit its columns, none of its rows is valid,
            or records are invalid (lists all of them with file and line).
    """
    row_format, records = found_records(path, PREFERENCE_ROWS, split=split, max_rows=max_rows, reading=reading)

    def make(record: Record) -> PreferenceRow:
        row = read_pair(record, row_format, reading)
        return row if check is None else check(row)

    rows, skipped = good_rows(path, records, make, bad_rows=bad_rows, skip_by=skip_by)
    kind = " of the kind preference"
    return RowFile(path=path, row_format=row_format, rows=rows, skipped=skipped, kind=kind)


def read_pair(
    record: Record,
    row_format: RowFormat[PairFields],
    reading: RowReading = AS_THEY_ARE,
    *,
    roots: Sequence[Path] | None = None,
) -> PreferenceRow:
    """Return the validated row of one record; raises UserError, with its location, for an invalid one.

    Args:
        roots: the folders below which files may be named; None takes those of `media_roots`.
    """
    values, location, base_dir = record
    columns = Columns(values, location=location, names=reading.names)
    fields = row_format.adapt(columns)
    check_columns(columns)
    if roots is None:
        roots = media_roots(base_dir, image_dir=reading.image_dir)
    parser = PairParser(fields, columns, reading.folder(base_dir), roots=roots)
    messages, plain = parser.asked(fields.messages, plain_template=reading.plain_template)
    chosen, rejected = parser.continuation(fields.chosen), parser.continuation(fields.rejected)
    parser.check_pair(chosen, rejected)
    chosen, rejected = (reading.bounded(side, location=location) for side in (chosen, rejected))
    margin = parser.margin(fields.margin, fields.chosen_score, fields.rejected_score)
    scores = parser.score(fields.chosen_score), parser.score(fields.rejected_score)
    parser.finish()
    # Before the prompt template, as in `read_row`; what is overlooked is known after it.
    check_shown(messages, columns)
    row = PreferenceRow(
        messages=reading.applied(messages, columns, plain=plain),
        location=location,
        datasource=fields.datasource,
        plain=plain,
        chosen=chosen,
        rejected=rejected,
        margin=margin,
        chosen_score=scores[0],
        rejected_score=scores[1],
    )
    parser.check_media()
    return row


def holds_pairs(path: str, *, split: str = "train", reading: RowReading = AS_THEY_ARE) -> bool:
    """Return whether a file's first records are pairs; raises UserError if it is missing or not readable."""
    if reading.names.names_sides:
        return True
    formats = PREFERENCE_ROWS.formats
    if reading.format is not None:
        return any(known.name == reading.format for known in formats)
    found = first_columns(path, split=split)
    return any(known.fits(found) for known in formats)
