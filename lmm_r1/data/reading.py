"""How a command's flags change the rows that it reads, and what happens to records that are not valid rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmm_r1.data.formats.row_format import ColumnNames, Record, RowFields, RowFormat, Unreadable, hidden_options
from lmm_r1.data.media_access import media_roots
from lmm_r1.data.messages import NO_PROMPT, BadRows, ImagePart, Message, Part, Row, SkippedRow, TextPart, VideoPart
from lmm_r1.data.row_parser import parse_row, parts_of, tagged_text
from lmm_r1.errors import ListedError, UserError
from lmm_r1.files.json_files import checked, read_json_lines

SHIPPED_PROMPTS = ("think", "think_box")
"""System prompts for the formats that verifiers pay; each is a text file next to this module."""

CONTENT = "content"
"""The prompt's text in a template, with tags for images and videos."""


class PromptTemplate:
    """A jinja template; referring to a column that a row does not have is an error."""

    def __init__(self, text: str, *, flag: str) -> None:
        """Compile it; raises UserError for a template that is broken or omits the prompt.

        Args:
            flag: the flag that set it, for messages.
        """
        self.text = text.strip()
        self.flag = flag
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(self.text))
            self._template = environment.from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{flag} line {error.lineno}: {error.message}; correct the template") from error
        if CONTENT not in used:
            raise UserError(f"{flag} omits the prompt; write {{{{ {CONTENT} }}}} where it belongs")

    def render(self, content: str, *, columns: Mapping[str, Any], location: str) -> str:
        """Return the prompt as the template writes it; raises UserError, with the location, if that fails."""
        try:
            return self._template.render({**columns, CONTENT: content})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UserError(f"{location}: {self.flag} cannot be filled in: {error}") from error


@dataclass(frozen=True, kw_only=True)
class RowReading:
    """The flags of a command about its rows; None leaves a setting to the rows."""

    format: str | None = None
    """The name of one, or `FILE.py:NAME`; None detects it."""
    names: ColumnNames = field(default_factory=ColumnNames)
    image_dir: Path | None = None
    """Where relative paths of images and videos start, instead of in the row file's folder."""
    min_pixels: int | None = None
    """For every image and video frame without a bound of its own."""
    max_pixels: int | None = None
    system_prompt: str | None = None
    """Replaces a row's system turn, or is added if the row has none."""
    default_prompt: str | None = None
    """The system turn of prompts that have none and whose user does not ask for an <answer> block."""
    prompt_template: PromptTemplate | None = None
    plain_template: str | None = None
    """What surrounds a plain-text prompt, which replaces {}; None applies the chat template to such prompts."""
    hidden_options: dict[str, str] | None = field(default=None, compare=False)
    """Collects what is wrong with prompts that do not show all options of their rows, by location; None ignores it."""

    def row(
        self,
        record: Mapping[str, Any],
        *,
        row_format: RowFormat[RowFields],
        location: str,
        base_dir: Path,
        answer_required: bool,
        media_required: bool = False,
    ) -> Row:
        """Return the validated row of a record; arguments and errors are those of `parse_row`."""
        row = parse_row(
            record,
            location=location,
            base_dir=self.folder(base_dir),
            row_format=row_format,
            format_is_named=self.format is not None,
            names=self.names,
            plain_template=self.plain_template,
            answer_required=answer_required,
            media_required=media_required,
            roots=media_roots(base_dir, image_dir=self.image_dir),
        )
        messages = self.applied(row.messages, record, location=location, plain=row.plain)
        return row if messages is row.messages else replace(row, messages=messages)

    def folder(self, base_dir: Path) -> Path:
        """Return where relative paths of a record start, given the folder of its file."""
        return base_dir if self.image_dir is None else self.image_dir

    def applied(
        self, messages: tuple[Message, ...], record: Mapping[str, Any], *, location: str, plain: bool
    ) -> tuple[Message, ...]:
        """Return a prompt with the run's template, system turn and pixel bounds applied.

        Raises:
            UserError: one of them does not fit the prompt.
        """
        if plain and (self.prompt_template is not None or self.system_prompt is not None):
            template = self.prompt_template
            flag = self.names.flag("system_prompt") if template is None else template.flag
            raise UserError(
                f"{location}: {flag} requires prompts that use the chat template, and this one is plain text; "
                "add --data.apply_chat_template"
            )
        if self.prompt_template is not None:
            messages = _templated(messages, record, template=self.prompt_template, location=location)
        if self.system_prompt is not None:
            turns = tuple(message for message in messages if message.role != "system")
            messages = (_system_turn(self.system_prompt), *turns)
        elif self.default_prompt is not None and not plain:
            own = any(
                one.role == "system" or (one.role == "user" and "<answer>" in tagged_text(one)) for one in messages
            )
            messages = messages if own else (_system_turn(self.default_prompt), *messages)
        if self.hidden_options is not None and (what := hidden_options(record, messages)) is not None:
            self.hidden_options[location] = what
        return self.bounded(messages, location=location)

    def bounded(self, messages: tuple[Message, ...], *, location: str) -> tuple[Message, ...]:
        """Return messages with the run's pixel bounds; raises UserError if those of a row contradict them."""
        if self.min_pixels is None and self.max_pixels is None:
            return messages
        return tuple(
            replace(message, parts=tuple(self._bounded(part, location=location) for part in message.parts))
            for message in messages
        )

    def _bounded(self, part: Part, *, location: str) -> Part:
        if not isinstance(part, ImagePart | VideoPart):
            return part
        lowest = self.min_pixels if part.min_pixels is None else part.min_pixels
        highest = self.max_pixels if part.max_pixels is None else part.max_pixels
        if lowest is not None and highest is not None and lowest > highest:
            raise UserError(
                f"{location}: an image's own pixel bound and that of the flags put min_pixels {lowest} above "
                f"max_pixels {highest}; correct one of them"
            )
        return replace(part, min_pixels=lowest, max_pixels=highest)


def shipped_prompt(name: str | None) -> str | None:
    """Return the text of a shipped system prompt; None if this is no name of one."""
    if name not in SHIPPED_PROMPTS:
        return None
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").strip()


def told_prompt(prompt: str | None, rows: Collection[Row], *, flag: str) -> str | None:
    """Return a sentence with a system prompt, given as text or a shipped one's name, and the number of rows that have it.

    None if no row has it.
    """
    shipped = shipped_prompt(prompt)
    text = shipped or (prompt if prompt != NO_PROMPT else "") or ""
    count = sum(row.messages[0] == _system_turn(text) for row in rows) if text else 0
    named = f"{flag} {prompt}" if shipped else flag
    told = f"system prompt of {count:,} of {len(rows):,} prompts ({named}; {NO_PROMPT} adds none): "
    return told + " ".join(text.split()) if count else None


def _system_turn(text: str) -> Message:
    return Message(role="system", parts=(TextPart(text),))


AS_THEY_ARE = RowReading()
"""Rows in the format that their columns indicate, unchanged."""


def _templated(
    messages: tuple[Message, ...], record: Mapping[str, Any], *, template: PromptTemplate, location: str
) -> tuple[Message, ...]:
    """Return the messages with the user's last turn written by the template, which also places its images and videos."""
    place = max((place for place, message in enumerate(messages) if message.role == "user"), default=None)
    if place is None:
        raise UserError(f"{location}: {template.flag} writes the user's turn, and the row has none")
    message = messages[place]
    text = template.render(tagged_text(message), columns=record, location=location)
    written = replace(message, parts=parts_of(text, message, location=location))
    return (*messages[:place], written, *messages[place + 1 :])


RowT = TypeVar("RowT")
MAX_LISTED = 20


def good_rows(
    path: str, records: Iterable[Record], make: Callable[[Record], RowT], *, bad_rows: BadRows, skip_by: str | None
) -> tuple[dict[int, RowT], list[SkippedRow]]:
    """Return the rows of a file by their index, and the records that were left out.

    Args:
        make: makes a row of a record; raises UserError for an invalid one.
        skip_by: the flag that leaves out bad rows, for messages; None if the command has none.

    Raises:
        UserError: there is no record, or no valid one, or `bad_rows` is `stop` and some are invalid; lists all of them.
    """
    rows: dict[int, RowT] = {}
    skipped: list[SkippedRow] = []
    for index, record in enumerate(records):
        try:
            if isinstance(record[0], Unreadable):
                raise record[0].error
            rows[index] = make(record)
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not rows and not skipped:
        raise UserError(f"{path} holds no rows; check the path")
    if skipped and bad_rows == "stop":
        way = f", or leave {'it' if len(skipped) == 1 else 'them'} out with {skip_by}" if skip_by and rows else ""
        if len(skipped) == 1:
            raise UserError(f"{skipped[0].reason}{way}")
        count = len(rows) + len(skipped)
        sentence = f"{path}: {len(skipped):,} of its {count:,} rows cannot be used; correct or remove them{way}:"
        raise ListedError(sentence, reasons(skipped))
    if not rows:
        raise UserError(f"{path}: none of its {len(skipped)} rows can be used; the first: {skipped[0].reason}")
    return rows, skipped


def reasons(skipped: Sequence[SkippedRow], *, listed_in: str | None = None) -> list[str]:
    """Return what is wrong with the rows that were left out, in the lines of `grouped`.

    Args:
        listed_in: the file that lists all of them.
    """
    lines = grouped([row.finding for row in skipped], most=MAX_LISTED)
    if listed_in and (len(lines) < len(skipped) or len(lines) > MAX_LISTED):
        lines[-1] += f"; {listed_in} lists them all"
    return lines


def grouped(findings: Iterable[tuple[str, str]], *, most: int) -> list[str]:
    """Return a line for each of the first `most` different findings, and a line with the number of the other rows.

    `[("a line 2", "no image"), ("a line 5", "no image")]` → `["a line 2 (2 rows, this is the first): no image"]`

    Args:
        findings: the location of each row and what is wrong with it.
    """
    same: dict[str, list[str]] = {}
    for location, what in findings:
        same.setdefault(what, []).append(location)
    lines = []
    for what, locations in list(same.items())[:most]:
        count = "" if len(locations) == 1 else f" ({len(locations):,} rows, this is the first)"
        lines.append(f"{locations[0]}{count}: {what}")
    if (more := sum(map(len, list(same.values())[most:]))) > 0:
        lines.append(f"and {more:,} more")
    return lines


def read_skipped(path: Path) -> list[SkippedRow]:
    """Return the rows that a file of JSON lines lists as left out, none if there is no such file."""
    if not path.exists():
        return []
    lines = (line for line in read_json_lines(path) if line.record is not None)
    return [checked(SkippedRow, line.record, place=line.place) for line in lines]
