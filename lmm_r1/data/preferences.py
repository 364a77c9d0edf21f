"""Rows with judged responses: a better and a worse one (DPO, reward models), one with a verdict (KTO), steps with labels (PRM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from lmm_r1.data.bad_rows import BadRows, SkippedRow, good_rows
from lmm_r1.data.files import first_columns, found_records
from lmm_r1.data.formats.preferences import PREFERENCE_ROWS
from lmm_r1.data.formats.row_format import (
    Columns,
    Fields,
    FormatSet,
    PairFields,
    Record,
    RowFormat,
    StepFields,
    UnpairedFields,
)
from lmm_r1.data.formats.steps import STEP_ROWS
from lmm_r1.data.formats.unpaired import UNPAIRED_ROWS
from lmm_r1.data.judged_parser import JudgedParser
from lmm_r1.data.messages import Message, Row
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.row_parser import check_shown

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
