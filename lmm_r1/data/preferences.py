"""Rows of preference training: pairs, unpaired verdicts and labelled steps."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from lmm_r1.data.bad_rows import BadRows, SkippedRow, good_rows
from lmm_r1.data.files import first_columns, found_records
from lmm_r1.data.formats.chats import chat_message
from lmm_r1.data.formats.judged import STEP_ROWS, UNPAIRED_ROWS
from lmm_r1.data.formats.preferences import PREFERENCE_ROWS
from lmm_r1.data.formats.row_format import (
    Column,
    Columns,
    Fields,
    FormatSet,
    PairFields,
    Record,
    RowFormat,
    StepFields,
    UnpairedFields,
    is_empty,
)
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.row_parser import RecordParser, check_shown

_YES = ("true", "1", "1.0", "+")
_NO = ("false", "0", "0.0", "-")


class JudgedParser(RecordParser):
    """Reads a record whose responses are judged."""

    def asked(self, value: Any, *, plain_template: str | None) -> tuple[tuple[Message, ...], bool]:
        """Return the prompt, and whether it is plain text; it must end with what is to be answered."""
        messages, plain = self.prompt(value, plain_template=plain_template)
        if messages[-1].role not in ("user", "tool"):
            self.fail(
                f'the prompt "{self.prompt_column}" ends with a turn of the role {messages[-1].role}; it must end with what is '
                "answered"
            )
        return messages, plain

    def continuation(self, column: Column) -> tuple[Message, ...]:
        """Return the turns of a response, the first and the last of them the assistant's; a text is one turn."""
        value = chat_message(column.value)
        if isinstance(value, (str, numbers.Number)) and not isinstance(value, bool):
            value = {"role": "assistant", "content": str(value)}
        turns = [value] if isinstance(value, Mapping) else value
        if is_empty(turns):
            self.fail(f'the field "{column.name}" is empty; fill it in')
        if isinstance(turns, bytes) or not isinstance(turns, Sequence):
            self.fail(f'"{column.name}" must be a text or a list of messages, not {type(turns).__name__}')
        messages = tuple(
            self.message(chat_message(turn), where=f'"{column.name}"{"" if len(turns) == 1 else f" message {number}"}')
            for number, turn in enumerate(turns, start=1)
        )
        if messages[0].role != "assistant" or messages[-1].role != "assistant":
            other = next(message.role for message in (messages[0], messages[-1]) if message.role != "assistant")
            self.fail(f'"{column.name}" must begin and end with a turn of the assistant, not of the role {other}')
        return messages

    def check_pair(self, chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
        """Raise UserError where two responses are the same, or only one of them has images or videos."""
        if _essence(chosen) == _essence(rejected):
            self.fail(
                "chosen and rejected are the same, so neither is the better; correct one of them, or leave the row out"
            )
        for kind, of in (("image", images_of), ("video", videos_of)):
            counts = len(of(chosen)), len(of(rejected))
            if 0 in counts and counts != (0, 0):
                side = "chosen" if counts[0] else "rejected"
                self.fail(
                    f"the response {side} has {max(counts)} {kind}s and the other one none; put what both see into the "
                    "prompt, or on both sides"
                )

    def score(self, column: Column) -> float | None:
        """Return a number, None where there is none."""
        if is_empty(column.value):
            return None
        number = _number(column.value)
        if number is None:
            self.fail(f'"{column.name}" is {_short(column.value)}; a finite number is needed, or nothing')
        return number

    def margin(self, given: Column, better: Column, worse: Column) -> float | None:
        """Return by how much a response is the better: what a column says, else what the scores of both differ by."""
        margin, high, low = self.score(given), self.score(better), self.score(worse)
        name = f'"{given.name}"'
        if margin is None and high is not None and low is not None:
            margin, name = high - low, f'"{better.name}" less "{worse.name}"'
        if margin is not None and margin < 0:
            self.fail(
                f"{name} is {margin:g}, so the rejected response would be the better; swap the two, or correct it"
            )
        return margin

    def desirable(self, column: Column) -> bool:
        """Return whether a response is to be learned."""
        value = _label(column.value)
        if value not in (0.0, 1.0):
            self.fail(
                f'the label "{column.name}" is {_short(column.value)}; true (desirable) or false (undesirable) is needed'
            )
        return value == 1.0

    def steps(self, column: Column) -> tuple[str, ...]:
        """Return the texts of the steps, without blanks around them."""
        value = column.value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
            self.fail(f'"{column.name}" must be a list with at least one step')
        steps = []
        for number, step in enumerate(value, start=1):
            if not isinstance(step, str) or not step.strip():
                self.fail(
                    f'step {number} of {len(value)} in "{column.name}" is empty or no text; fill it in, or leave it out with its label'
                )
            self.check_characters(step, where=f'step {number} of "{column.name}"')
            steps.append(step.strip())
        return tuple(steps)

    def step_labels(self, column: Column, *, count: int) -> tuple[float, ...]:
        """Return the labels of `count` steps, from 0 (wrong) to 1 (right)."""
        value = column.value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            self.fail(f'the field "{column.name}" must be a list with a label for each step')
        if len(value) != count:
            self.fail(f'"{column.name}" has {len(value)} labels for {count} steps; each step needs one')
        labels = []
        for number, given in enumerate(value, start=1):
            label = _label(given)
            if label is None or not 0 <= label <= 1:
                self.fail(
                    f'the label of step {number} in "{column.name}" is {_short(given)}; true or false, + or -, or a number from 0 to 1 '
                    "is needed"
                )
            labels.append(label)
        return tuple(labels)


def _label(value: Any) -> float | None:
    """Return 1.0 for what says yes, 0.0 for what says no, a number as it is, None for anything else."""
    text = str(value).strip().lower()
    return 1.0 if text in _YES else 0.0 if text in _NO else _number(value)


def _number(value: Any) -> float | None:
    """Return a finite number, also one that a table holds as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _essence(messages: Sequence[Message]) -> list[object]:
    """Return what makes responses differ: roles, texts less the blanks around them, and media."""
    found: list[object] = []
    for message in messages:
        found.append(
            (message.role, "".join(part.text for part in message.parts if isinstance(part, TextPart)).strip())
        )
        found += [part for part in message.parts if isinstance(part, (ImagePart, VideoPart))]
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


JudgedKind: TypeAlias = Literal["preference", "unpaired", "steps"]


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """What is asked of a row with judged responses."""

    messages: tuple[Message, ...]
    """The prompt with its images and videos; it ends with a turn of the user or of a tool."""
    location: str
    """File and line, for error messages."""
    datasource: str = "default"
    """Metrics may be told apart by it."""
    plain: bool = False
    """Its text goes to the tokenizer as it stands, without the chat template; it has no images and videos then."""

    def conversation(self, turns: tuple[Message, ...]) -> Row:
        """Return the prompt with the turns of a response behind it."""
        return Row(
            messages=(*self.messages, *turns),
            answer="",
            datasource=self.datasource,
            location=self.location,
            plain=self.plain,
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(JudgedRow):
    """A prompt with a better and a worse response, which differ and are not empty."""

    chosen: tuple[Message, ...]
    """The turns behind the prompt, the first and the last of them the assistant's."""
    rejected: tuple[Message, ...]
    margin: float | None
    """By how much the chosen one is the better, 0 or more (arXiv 2307.09288); None where the row does not say."""
    chosen_score: float | None = None
    """What a judge or a reward gave it; None where the row does not say."""
    rejected_score: float | None = None

    @property
    def sides(self) -> tuple[Row, Row]:
        """The conversation that ends with the chosen response, and that with the rejected one."""
        return self.conversation(self.chosen), self.conversation(self.rejected)


@dataclass(frozen=True, kw_only=True)
class UnpairedRow(JudgedRow):
    """A prompt with one response (KTO, arXiv 2402.01306)."""

    response: tuple[Message, ...]
    """The turns behind the prompt, the first and the last of them the assistant's."""
    desirable: bool


@dataclass(frozen=True, kw_only=True)
class StepRow(JudgedRow):
    """A prompt with the steps of one response (Math-Shepherd, arXiv 2312.08935)."""

    steps: tuple[str, ...]
    """Their texts in order, without a step tag and without blanks around them."""
    labels: tuple[float, ...]
    """Of each step, from 0 (wrong) to 1 (right)."""


RowT = TypeVar("RowT", bound=JudgedRow)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The validated prompt of a row."""

    messages: tuple[Message, ...]
    plain: bool


@dataclass(frozen=True, kw_only=True)
class RowKind(Generic[Fields, RowT]):
    """One kind of rows with judged responses."""

    name: JudgedKind
    formats: FormatSet[Fields]
    read: Callable[[Fields, JudgedParser, RowReading, Asked], RowT]
    """Makes a row of what its format found; raises UserError for what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class JudgedFile(Generic[RowT]):
    """The rows of one file, and in which format they were found."""

    path: str
    kind: JudgedKind
    row_format: RowFormat[Any]
    rows: dict[int, RowT]
    """By their place in the file."""
    skipped: list[SkippedRow]
    """The records that a row could not be made of, where those are left out."""

    @property
    def told(self) -> str:
        """What a command says of it: `rows.jsonl: 6 rows of the kind unpaired in the format kto (rows with a KTO tag)`."""
        named = f"{self.row_format.name} ({self.row_format.source})"
        return f"{self.path}: {len(self.rows)} rows of the kind {self.kind} in the format {named}"


def load_preference_rows(
    source: str, *, split: str = "train", max_rows: int | None = None, reading: RowReading = AS_THEY_ARE
) -> list[PreferenceRow]:
    """Return the first `max_rows` preferences of a row file, folder or dataset; raises what `read_judged_file` does."""
    return list(read_judged_file(source, PREFERENCE, split=split, max_rows=max_rows, reading=reading).rows.values())


def load_unpaired_rows(
    source: str, *, split: str = "train", max_rows: int | None = None, reading: RowReading = AS_THEY_ARE
) -> list[UnpairedRow]:
    """Return the same of rows with one response and a verdict."""
    return list(read_judged_file(source, UNPAIRED, split=split, max_rows=max_rows, reading=reading).rows.values())


def load_step_rows(
    source: str, *, split: str = "train", max_rows: int | None = None, reading: RowReading = AS_THEY_ARE
) -> list[StepRow]:
    """Return the same of rows with steps."""
    return list(read_judged_file(source, STEPS, split=split, max_rows=max_rows, reading=reading).rows.values())


def read_judged_file(
    path: str,
    kind: RowKind[Fields, RowT],
    *,
    split: str = "train",
    max_rows: int | None = None,
    reading: RowReading = AS_THEY_ARE,
    check: Callable[[RowT], None] | None = None,
    bad_rows: BadRows = "stop",
    skip_by: str | None = None,
) -> JudgedFile[RowT]:
    """Return the first `max_rows` rows, all of them validated and their local images and videos known to be there.

    Args:
        check: raises UserError for a row that the command has no use for.
        bad_rows: whether records that break their format stop it, or are left out as `skipped`.
        skip_by: how the command is told to leave them out, for messages; None where it cannot be.

    Raises:
        UserError: the file is missing, empty or not readable, several formats fit its columns, or records break their
            format (all of them with file and line), or all that there are do.
    """
    row_format, records = found_records(path, kind.formats, split=split, max_rows=max_rows, reading=reading)

    def make(record: Record) -> RowT:
        row = read_judged_row(record, row_format, kind, reading)
        if check is not None:
            check(row)
        return row

    rows, skipped = good_rows(path, records, make, bad_rows=bad_rows, skip_by=skip_by)
    return JudgedFile(path=path, kind=kind.name, row_format=row_format, rows=rows, skipped=skipped)


def read_judged_row(
    record: Record, row_format: RowFormat[Fields], kind: RowKind[Fields, RowT], reading: RowReading = AS_THEY_ARE
) -> RowT:
    """Return the validated row of one record; raises UserError, with its location, for what is wrong with it."""
    values, location, base_dir = record
    columns = Columns(values, location=location, names=reading.names)
    fields = row_format.adapt(columns)
    parser = JudgedParser.of(fields, columns, reading.folder(base_dir))
    messages, plain = parser.asked(fields.messages, plain_template=reading.plain_template)
    shown = reading.laid_over(messages, values, location=location, plain=plain)
    row = kind.read(fields, parser, reading, Asked(messages=shown, plain=plain))
    parser.finish()
    check_shown(row.messages, columns)
    parser.check_media()
    return row


def _preference(fields: PairFields, parser: JudgedParser, reading: RowReading, asked: Asked) -> PreferenceRow:
    chosen, rejected = parser.continuation(fields.chosen), parser.continuation(fields.rejected)
    parser.check_pair(chosen, rejected)
    return PreferenceRow(
        messages=asked.messages,
        plain=asked.plain,
        location=parser.location,
        datasource=fields.datasource,
        chosen=reading.bounded(chosen, location=parser.location),
        rejected=reading.bounded(rejected, location=parser.location),
        margin=parser.margin(fields.margin, fields.chosen_score, fields.rejected_score),
        chosen_score=parser.score(fields.chosen_score),
        rejected_score=parser.score(fields.rejected_score),
    )


def _unpaired(fields: UnpairedFields, parser: JudgedParser, reading: RowReading, asked: Asked) -> UnpairedRow:
    response = parser.continuation(fields.response)
    return UnpairedRow(
        messages=asked.messages,
        plain=asked.plain,
        location=parser.location,
        datasource=fields.datasource,
        response=reading.bounded(response, location=parser.location),
        desirable=parser.desirable(fields.label),
    )


def _steps(fields: StepFields, parser: JudgedParser, reading: RowReading, asked: Asked) -> StepRow:
    steps = parser.steps(fields.steps)
    return StepRow(
        messages=asked.messages,
        plain=asked.plain,
        location=parser.location,
        datasource=fields.datasource,
        steps=steps,
        labels=parser.step_labels(fields.labels, count=len(steps)),
    )


PREFERENCE = RowKind(name="preference", formats=PREFERENCE_ROWS, read=_preference)
UNPAIRED = RowKind(name="unpaired", formats=UNPAIRED_ROWS, read=_unpaired)
STEPS = RowKind(name="steps", formats=STEP_ROWS, read=_steps)
KINDS: tuple[RowKind[Any, Any], ...] = (PREFERENCE, STEPS, UNPAIRED)


def find_kind(path: str, *, split: str = "train", reading: RowReading = AS_THEY_ARE) -> RowKind[Any, Any] | None:
    """Return the kind of judged rows that the columns of a file's first records tell, None where they tell no such kind.

    Raises:
        UserError: the file is missing or not readable.
    """
    if reading.names.names_sides:
        return PREFERENCE
    if reading.format is not None:
        named = (kind for kind in KINDS if any(known.name == reading.format for known in kind.formats.formats))
        return next(named, None)
    found = first_columns(path, split=split)
    return next((kind for kind in KINDS if any(known.fits(found) for known in kind.formats.formats)), None)
