"""Rows that bring their responses along: the output of an earlier job, or conversations that end with an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lmm_r1.batch.trajectories import MESSAGES
from lmm_r1.data.bad_rows import SkippedRow, Unreadable
from lmm_r1.data.files import all_records
from lmm_r1.data.formats import FORMATS, OWN
from lmm_r1.data.formats.row_format import Record
from lmm_r1.data.messages import Row, TextPart, demonstration
from lmm_r1.data.reading import RowReading
from lmm_r1.data.sample import WHOLE, Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Outcome

PROMPT_KEY = "prompt"
RESPONSES_KEY = "responses"


def load_responses(
    path: str,
    *,
    split: str,
    max_rows: int | None,
    reading: RowReading,
    count_tokens: Callable[[str], int | None],
) -> tuple[list[Outcome], list[SkippedRow]]:
    """Return the rows of a file with their responses, and the records that cannot be used.

    Raises UserError where the file is missing, empty or not readable.
    """
    outcomes: list[Outcome] = []
    skipped: list[SkippedRow] = []
    for index, record in _first(all_records(path, split=split), max_rows):
        try:
            outcomes.append(_outcome(index, record, reading=reading, count_tokens=count_tokens))
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not outcomes:
        reason = f"; the first: {skipped[0].reason}" if skipped else ""
        raise UserError(f"{path} holds no rows with responses{reason}; check the path")
    return outcomes, skipped


def _first(records: Iterator[Record], count: int | None) -> Iterator[tuple[int, Record]]:
    for index, record in enumerate(records):
        if index == count:
            return
        yield index, record


def _outcome(
    index: int,
    record: Record,
    *,
    reading: RowReading,
    count_tokens: Callable[[str], int | None],
) -> Outcome:
    location = record[1]
    if isinstance(record[0], Unreadable):
        raise record[0].error
    listed = record[0].get(RESPONSES_KEY)
    if listed is not None and reading.names.prompt is None:
        reading = replace(reading, names=replace(reading.names, prompt=PROMPT_KEY))
    row = _row(record, reading)
    if listed is None:
        row, text = _split(row)
        return Outcome(index=index, row=row, completions=(_completion({"text": text}, location, count_tokens),))
    if not isinstance(listed, list) or not listed:
        raise UserError(f'{location}: "{RESPONSES_KEY}" must be a list with at least one response')
    if any(isinstance(response, Mapping) and MESSAGES in response for response in listed):
        raise UserError(
            f"{location}: the row holds episodes of several turns, and what scores responses here scores single ones"
        )
    completions = tuple(_completion(response, location, count_tokens) for response in listed)
    return Outcome(index=index, row=row, completions=completions)


def _row(record: Record, reading: RowReading) -> Row:
    """Return the row in this project's own format, where none is named."""
    fields, location, base_dir = record
    row_format = OWN if reading.format is None else FORMATS[reading.format]
    row = reading.row(
        fields,
        row_format=row_format,
        location=location,
        base_dir=base_dir,
        answer_required=False,
        media_required=True,
    )
    return demonstration(row)


def _split(row: Row) -> tuple[Row, str]:
    """Return the row without its last turn, and the text of that turn."""
    *before, last = row.messages
    if last.role != "assistant" or not before:
        raise UserError(
            f'{row.location}: there is nothing to score: the row has no "{RESPONSES_KEY}" and does not end with an '
            "assistant turn behind a prompt"
        )
    texts = [part.text for part in last.parts if isinstance(part, TextPart)]
    if len(texts) < len(last.parts):
        raise UserError(f"{row.location}: the assistant turn to score must be text")
    return replace(row, messages=tuple(before)), "".join(texts)


def _completion(response: Any, location: str, count_tokens: Callable[[str], int | None]) -> Completion:
    if not isinstance(response, Mapping) or not isinstance(response.get("text"), str):
        raise UserError(f'{location}: a response must be an object with a "text"')
    tokens = response.get("tokens")
    reason = response.get("finish_reason", "stop")
    if reason not in WHOLE:
        raise UserError(f'{location}: the finish_reason {reason!r} is unknown; it is "stop" or "length"')
    return Completion(
        text=response["text"],
        num_tokens=tokens if isinstance(tokens, int) else count_tokens(response["text"]),
        finish_reason=reason,
    )
