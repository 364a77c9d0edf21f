"""Rows of preference training: pairs of responses to one prompt."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from lmm_r1.data.files import RowFile, first_columns, found_records
from lmm_r1.data.formats import CONVERSATIONS, IMAGES, PROMPTS, VIDEOS, FormatSet, prompt_of
from lmm_r1.data.formats.chats import DATASOURCE, chat_message, media_first, with_system, written_messages
from lmm_r1.data.formats.row_format import (
    ROW,
    AskedFields,
    Column,
    Columns,
    Record,
    RowFormat,
    check_keys,
    is_empty,
    text_of_number,
)
from lmm_r1.data.media_access import media_roots
from lmm_r1.data.messages import BadRows, ImagePart, Message, PreferenceRow, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.reading import AS_THEY_ARE, RowReading, good_rows
from lmm_r1.data.row_parser import RecordParser, check_shown

_BETTER_SCORES = ("chosen_reward", "chosen_score", "score_chosen")
_WORSE_SCORES = ("rejected_reward", "rejected_score", "score_rejected")


@dataclass(frozen=True, kw_only=True)
class PairFields(AskedFields):
    """A prompt with a better and a worse response, as text or turns."""

    chosen: Column
    rejected: Column
    chosen_score: Column
    rejected_score: Column
    margin: Column


def _pair(columns: Columns) -> PairFields:
    """Without a prompt column, the prompt is the common beginning of both conversations; with one, they may repeat it."""
    images, flag = columns.images(*IMAGES), columns.names.flag
    sides = {"chosen_key": columns.names.chosen or "chosen", "rejected_key": columns.names.rejected or "rejected"}
    better, worse = map(columns.take, sides.values())
    for side, key in zip((better, worse), sides, strict=True):
        if side.value is None:
            columns.fail(f'the field "{side.name}" is empty; fill it in, or name another with {flag(key)}')
    better, worse = (replace(side, value=written_messages(side.value)) for side in (better, worse))
    held = [names for names in (PROMPTS, CONVERSATIONS) if not all(is_empty(columns.record.get(one)) for one in names)]
    if held or columns.names.prompt is not None:
        # Datasets repeat the prompt in a conversation.
        messages = prompt_of(columns, images=images, names=(held or [PROMPTS])[0])
        asked = columns.value(columns.prompt_column)
        better, worse = (_without_prompt(asked, side, columns=columns) for side in (better, worse))
        for name in CONVERSATIONS:
            said = columns.record.get(name)
            if columns.prompt_column not in CONVERSATIONS and not is_empty(said) and not _begins(said, asked):
                columns.fail(
                    f'both "{columns.prompt_column}" and "{name}" are given, and they differ; empty one of them'
                )
    else:
        columns.prompt_column = better.name
        asked, better, worse = _common(better, worse, columns=columns)
        messages = with_system(media_first(asked, images), columns=columns)
    return PairFields(
        messages=messages,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        chosen=better,
        rejected=worse,
        chosen_score=columns.take(*_BETTER_SCORES),
        rejected_score=columns.take(*_WORSE_SCORES),
        margin=columns.take("margin"),
    )


PREFERENCE = RowFormat(name="preference", source="preferences", needs=(("chosen",), ("rejected",)), adapt=_pair)
PREFERENCE_ROWS = FormatSet(formats=(PREFERENCE,), own=PREFERENCE)
"""Rows that DPO and reward models train on."""


def _without_prompt(prompt: Any, side: Column, *, columns: Columns) -> Column:
    """Return a side without the prompt, if it is a conversation that begins with it."""
    turns = _turns(side.value)
    if turns is None or _role(turns[0]) not in ("user", "system"):
        return side
    if not _begins(turns, prompt):
        columns.fail(
            f'"{side.name}" begins with a prompt that differs from the row\'s; both sides must answer the same'
        )
    return replace(side, value=turns[len(_asked(prompt)) :])


def _asked(prompt: Any) -> list[Any]:
    return _turns(written_messages(prompt)) or [{"role": "user", "content": prompt}]


def _begins(conversation: Any, prompt: Any) -> bool:
    """Return whether a conversation begins with a prompt."""
    asked, turns = _asked(prompt), _turns(conversation) or []
    return list(map(_comparable, turns[: len(asked)])) == list(map(_comparable, asked))


def _common(better: Column, worse: Column, *, columns: Columns) -> tuple[Any, Column, Column]:
    one, other = _turns(better.value), _turns(worse.value)
    if one is None or other is None or "assistant" in (_role(one[0]), _role(other[0])):
        columns.fail(
            f'no field {" or ".join((*PROMPTS, *CONVERSATIONS))} with the prompt, and "{better.name}" and "{worse.name}" are no '
            f"conversations that begin with it; name it with {columns.names.prompt_flag}"
        )
    same = takewhile(lambda pair: _comparable(pair[0]) == _comparable(pair[1]), zip(one, other, strict=False))
    # If one conversation is the beginning of the other, its last turn is the response.
    count = min(len(list(same)), len(one) - 1, len(other) - 1)
    if _role(one[count]) != "assistant" or _role(other[count]) != "assistant":
        columns.fail(f'"{better.name}" and "{worse.name}" are answers to different prompts; both must answer the same')
    return one[:count], replace(better, value=one[count:]), replace(worse, value=other[count:])


def _turns(value: Any) -> list[Any] | None:
    """Return the chat messages of a non-empty list; None for anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    return [chat_message(turn) for turn in value]


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _comparable(turn: Any) -> Any:
    """Return what is compared of a message: blanks around a text and empty fields of parts do not count."""
    content = turn.get("content") if isinstance(turn, Mapping) else turn
    if isinstance(content, str) or not isinstance(content, Sequence):
        return _role(turn), content.strip() if isinstance(content, str) else content
    parts = [dict(part) if isinstance(part, Mapping) else {"": part} for part in content]
    return _role(turn), [{name: value for name, value in part.items() if value is not None} for part in parts]


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
        try:
            number = math.nan if isinstance(column.value, bool) else float(column.value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.fail(f'"{column.name}" is {column.value!r:.60}; it must be a finite number, or empty')
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
    return RowFile(path=path, row_format=row_format, rows=rows, skipped=skipped, kind=" of the kind preference")


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
    check_keys(ROW, columns.rest(), columns)
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
    # Before the prompt template, as in `parse_row`.
    check_shown(messages, columns)
    row = PreferenceRow(
        messages=reading.applied(messages, values, location=location, plain=plain),
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
    if reading.names.names_sides or reading.format is not None:
        return reading.names.names_sides
    return PREFERENCE.fits(first_columns(path, split=split))
