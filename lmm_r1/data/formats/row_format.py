"""What a row format is: the columns that tell it, and how a record of it becomes messages, answer and media."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from lmm_r1.errors import UserError

Record: TypeAlias = tuple[dict[str, Any], str, Path]
"""A row file's record, its location such as `rows.jsonl line 7`, and the folder that relative paths start from."""


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Columns that the user named in place of a format's own; None leaves them to the format."""

    prompt: str | None = None
    response: str | None = None
    answer: str | None = None
    images: str | None = None
    videos: str | None = None
    datasource: str | None = None
    chosen: str | None = None
    """Of a preference, the better response, or the whole conversation with it."""
    rejected: str | None = None
    """The worse one."""
    step_tag: str | None = None
    """No column, but what stands behind every step of a text with steps."""
    step_flag: str = "--step_tag"
    """No column, but the flag that names it on this command's line, for messages."""
    prompt_flag: str = "--data.input_key"
    """No column, but the flag that names the prompt's on this command's line, for messages."""

    @property
    def names_sides(self) -> bool:
        """Whether a preference has its responses in columns of other names than the usual ones."""
        return self.chosen not in (None, "chosen") or self.rejected not in (None, "rejected")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column's name, for messages, and its value, None where a record does not have it."""

    name: str
    value: Any


NOTHING = Column(name="response", value=None)


class Columns:
    """A record's columns as an adapter takes them; those that none took are the row's other columns."""

    def __init__(
        self, record: Mapping[str, Any], *, location: str, names: ColumnNames, format_is_named: bool = False
    ) -> None:
        """Args: format_is_named: the user named the row format; it was not detected from the columns."""
        self.record = record
        self.location = location
        self.names = names
        self.format_is_named = format_is_named
        self.prompt_column = "messages"
        """Where the prompt was found, for messages."""
        self._taken: set[str] = set()
        self._shown: set[str] = set()

    def fail(self, sentence: str) -> NoReturn:
        raise UserError(f"{self.location}: {sentence}")

    def take(self, *names: str) -> Column:
        """Return the one of these columns that holds something, else the first of them, empty.

        Raises UserError where two of them hold different things: one of them would be lost.
        """
        held = [Column(name=name, value=self.record[name]) for name in names if not is_empty(self.record.get(name))]
        if not held:
            return self.first(*names)
        self._taken.update(column.name for column in held)
        for other in held[1:]:
            if listed(other.value) != listed(held[0].value):
                self.fail(
                    f'both "{held[0].name}" and "{other.name}" are given, and they differ; empty one of them, or leave it out'
                )
        return held[0]

    def first(self, *names: str) -> Column:
        """Return the first of these columns that holds something, else the first of them, empty."""
        held = next((name for name in names if not is_empty(self.record.get(name))), None)
        # What is there and empty is what a message is about.
        name = held or next((name for name in names if name in self.record), names[0])
        self._taken.add(name)
        return Column(name=name, value=None if held is None else self.record[name])

    def text(self, *names: str) -> str | None:
        """Return the text of `take`, None where there is none; raises UserError for what is neither text nor a number."""
        found = self.take(*names)
        if found.value is None or isinstance(found.value, str):
            return found.value
        if isinstance(found.value, bool) or not isinstance(found.value, numbers.Number):
            self.fail(f'the field "{found.name}" must be text, not {type(found.value).__name__}')
        return str(found.value)

    def prompt(self, *names: str) -> Any:
        """Return the value of the prompt's column; raises UserError where the record has none."""
        names = names if self.names.prompt is None else (self.names.prompt,)
        found = self._show(*names)
        self.prompt_column = found.name
        if found.value is None:
            wanted = " or ".join(f'"{name}"' for name in names)
            if found.name in self.record:
                self.fail(
                    f'the field "{found.name}" is empty; fill it in, or name another with {self.names.prompt_flag}'
                )
            self.fail(
                f"no field {wanted} (found: {', '.join(self.record) or 'nothing'}); name it with "
                f"{self.names.prompt_flag}, or another row format with --data.format"
            )
        return found.value

    def answer(self, *names: str) -> Column:
        return self.take(*(names if self.names.answer is None else (self.names.answer,)))

    def images(self, *names: str, otherwise: str | None = None) -> Column:
        """Return the images of these columns.

        Args:
            otherwise: the column that holds them where none of these does; else it repeats them by their paths.
        """
        if self.names.images is not None:
            return self._show(self.names.images)
        found = self._show(*names)
        return found if found.value is not None or otherwise is None else self._show(otherwise)

    def videos(self, *names: str) -> Column:
        return self._show(*(names if self.names.videos is None else (self.names.videos,)))

    def _show(self, *names: str) -> Column:
        found = self.take(*names)
        self._shown.add(found.name)
        return found

    def datasource(self, *names: str) -> str:
        """Return the value by which metrics are told apart; raises UserError where the column that was named is not there."""
        named = self.names.datasource
        if named is not None and named not in self.record:
            self.fail(
                f'no field "{named}" (found: {", ".join(self.record)}); name the source\'s with --data.datasource_key'
            )
        value = self.first(*(names if named is None else (named,))).value
        return "default" if value is None else str(value)

    def rest(self) -> dict[str, Any]:
        """Return the columns that nothing was taken from."""
        return {name: value for name, value in self.record.items() if name not in self._taken}

    def beside_prompt(self) -> dict[str, Any]:
        """Return all columns but those of the prompt and its media: what reward functions and environments may ask for."""
        return {name: value for name, value in self.record.items() if name not in self._shown}


@dataclass(frozen=True, kw_only=True)
class AskedFields:
    """What every format makes of a record, before it is checked: what is asked."""

    messages: Any
    """The prompt: a list of messages, JSON text of one, or text with `<image>` and `<video>` tags."""
    images: Column
    """What fills `<image>` tags, and image parts without a source, in order."""
    videos: Column
    """The same for videos."""
    datasource: str


@dataclass(frozen=True, kw_only=True)
class RowFields(AskedFields):
    """A prompt with its answer, and with the response that SFT learns."""

    answer: Column
    """The gold answer."""
    response: Column = NOTHING
    """The assistant turn that SFT learns behind the messages, as text or as a message."""
    rejected: Column = NOTHING
    """The worse one of a preference, in the same form."""
    prefill: str = ""
    """How a response to the messages begins; the model goes on from there."""


@dataclass(frozen=True, kw_only=True)
class PairFields(AskedFields):
    """A prompt with a better and a worse response, as text or turns."""

    chosen: Column
    rejected: Column
    chosen_score: Column
    rejected_score: Column
    margin: Column


@dataclass(frozen=True, kw_only=True)
class UnpairedFields(AskedFields):
    """A prompt with a response, as text or turns, and whether that is desirable."""

    response: Column
    label: Column


@dataclass(frozen=True, kw_only=True)
class StepFields(AskedFields):
    """A prompt with the steps of a response and their labels, a list each."""

    steps: Column
    labels: Column


Fields = TypeVar("Fields", bound=AskedFields)


@dataclass(frozen=True, kw_only=True)
class RowFormat(Generic[Fields]):
    """One kind of row; it is found where a file has one column of each of `needs` and none of `without`."""

    name: str
    source: str
    """Whose rows they are, in a word or two."""
    needs: tuple[tuple[str, ...], ...]
    without: tuple[str, ...] = ()
    adapt: Callable[[Columns], Fields]
    link: Callable[[list[Record]], list[Record]] | None = field(default=None)
    """Where records refer to others of their file: puts what they refer to into them."""

    def fits(self, columns: set[str]) -> bool:
        return all(not columns.isdisjoint(names) for names in self.needs) and columns.isdisjoint(self.without)

    @property
    def wants(self) -> str:
        """Its columns in words: `problem, solution`."""
        return ", ".join(" or ".join(names) for names in self.needs)


@dataclass(frozen=True, kw_only=True)
class FormatSet(Generic[Fields]):
    """The formats that rows of one kind come in."""

    formats: tuple[RowFormat[Fields], ...]
    own: RowFormat[Fields]
    """That of a file which fits none, and of one whose columns the user named."""
    others: tuple[RowFormat[Any], ...] = ()
    """Formats of another kind that would be taken for one of these, and must not be."""

    def find(self, columns: Iterable[str], *, file: str, label: str | None = None) -> RowFormat[Fields]:
        """Return the one format that a file with these columns has.

        Args:
            label: a column that the user named as the answer, so that it tells nothing else.

        Raises:
            UserError: several fit, or one of another kind.
        """
        names = set(columns)
        for other in self.others:
            if other.fits(names - {label}):
                raise UserError(
                    f"{file}: its columns are those of {other.name} ({other.source}), whose responses are not all to be "
                    "learned; train on them with train_kto, or say with --data.format how the rows are to be read"
                )
        fitting = [row_format for row_format in self.formats if row_format.fits(names)]
        if len(fitting) > 1:
            choices = " and ".join(f"{row_format.name} ({row_format.wants})" for row_format in fitting)
            raise UserError(f"{file}: its columns fit the row formats {choices}; choose one with --data.format")
        return fitting[0] if fitting else self.own

    def named(self, name: str, *, file: str) -> RowFormat[Fields]:
        """Return the format of this name; raises UserError where rows of this kind do not come in it."""
        for row_format in self.formats:
            if row_format.name == name:
                return row_format
        known = ", ".join(row_format.name for row_format in self.formats)
        raise UserError(f"{file}: --data.format {name} is of rows of another kind; those wanted here come as {known}")


def listed(value: Any) -> list[Any]:
    """Return a media column's value as a list: a single entry needs none."""
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return [value]
    return list(value)


def is_empty(value: Any) -> bool:
    """Return whether a column holds nothing: null, as pandas and CSV files may write it, a blank text, an empty container."""
    if isinstance(value, float):
        return math.isnan(value)
    return not filled(value) or (isinstance(value, Sequence | Mapping) and not value)


def filled(text: Any) -> bool:
    """Return whether a column holds text, or anything that is not text."""
    return text is not None and not (isinstance(text, str) and not text.strip())


def media_entries(column: Column) -> list[Any]:
    """Return the images or videos of a column; empty entries are none: null, NaN, "", and a struct of empty fields."""
    return [entry for entry in listed(column.value) if is_media(entry)]


def is_media(entry: Any) -> bool:
    """Return whether an entry of a media column holds anything."""
    if isinstance(entry, Mapping):
        return any(map(is_media, entry.values()))
    is_nan = isinstance(entry, float) and math.isnan(entry)
    return filled(entry) and not is_nan and not (isinstance(entry, bytes) and not entry)
