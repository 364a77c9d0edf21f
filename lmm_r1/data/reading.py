"""Reading rows: their prompts, templates and formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from lmm_r1.data.formats import FormatName
from lmm_r1.data.formats.row_format import ColumnNames, Columns, RowFields, RowFormat
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart, VideoPart
from lmm_r1.data.row_parser import parts_of, read_row, tagged_text
from lmm_r1.errors import UserError

CONTENT = "content"
"""What a template calls the prompt's text, in which tags stand for images and videos."""
# What an expression of a template may end in.
_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class PromptTemplate:
    """A jinja template; what it asks of a row that has no such column is an error."""

    def __init__(self, text: str, *, flag: str) -> None:
        """Compile it; raises UserError for a template that is broken or leaves the prompt out.

        Args:
            flag: the flag that gave it, for the messages.
        """
        self.text = text.strip()
        self.flag = flag
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(self.text))
            self._template = environment.from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{flag} line {error.lineno}: {error.message}; correct the template") from error
        if CONTENT not in used:
            raise UserError(f"{flag} leaves the prompt out; write {{{{ {CONTENT} }}}} where it goes")

    def render(self, content: str, *, columns: Mapping[str, Any], location: str) -> str:
        """Return the prompt as the template writes it; raises UserError, with the location, where it cannot."""
        try:
            return self._template.render({**columns, CONTENT: content})
        except _ERRORS as error:
            raise UserError(f"{location}: {self.flag} cannot be filled in: {error}") from error


@dataclass(frozen=True, kw_only=True)
class RowReading:
    """What the flags of a command say of its rows; None leaves a matter to the rows."""

    format: FormatName | None = None
    names: ColumnNames = field(default_factory=ColumnNames)
    image_dir: Path | None = None
    """Where relative paths of images and videos start, in place of the row file's folder."""
    min_pixels: int | None = None
    """For every image, and frame of a video, that has no bound of its own."""
    max_pixels: int | None = None
    system_prompt: str | None = None
    """Takes the place of a row's system turn, or stands in front where there is none."""
    prompt_template: PromptTemplate | None = None
    plain_template: str | None = None
    """What stands around a plain-text prompt, with {} in its place, which is plain then; None leaves it to the chat template."""

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
        """Return the validated row of a record; takes and raises what `read_row` does."""
        columns = Columns(record, location=location, names=self.names, format_is_named=self.format is not None)
        row = read_row(
            row_format,
            columns,
            self.folder(base_dir),
            answer_required=answer_required,
            plain_template=self.plain_template,
            media_required=media_required,
        )
        messages = self.laid_over(row.messages, record, location=location, plain=row.plain)
        return row if messages is row.messages else replace(row, messages=messages)

    def folder(self, base_dir: Path) -> Path:
        """Return where relative paths of a record start, whose file lies in `base_dir`."""
        return base_dir if self.image_dir is None else self.image_dir

    def laid_over(
        self, messages: tuple[Message, ...], record: Mapping[str, Any], *, location: str, plain: bool
    ) -> tuple[Message, ...]:
        """Return a prompt with the template, the system turn and the pixel bounds of the run.

        Raises:
            UserError: one of them does not go with the prompt.
        """
        if plain and (self.prompt_template is not None or self.system_prompt is not None):
            flag = "--data.system_prompt" if self.prompt_template is None else "--data.prompt_template"
            raise UserError(
                f"{location}: {flag} is for prompts that the chat template writes, and this one is plain text; "
                "add --data.apply_chat_template"
            )
        if self.prompt_template is not None:
            messages = _templated(messages, record, template=self.prompt_template, location=location)
        if self.system_prompt is not None:
            turns = tuple(message for message in messages if message.role != "system")
            messages = (Message(role="system", parts=(TextPart(self.system_prompt),)), *turns)
        return self.bounded(messages, location=location)

    def bounded(self, messages: tuple[Message, ...], *, location: str) -> tuple[Message, ...]:
        """Return messages with the pixel bounds of the run; raises UserError where those of a row contradict them."""
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
                f"{location}: an image's own pixel bound and that of the flags leave min_pixels {lowest} above "
                f"max_pixels {highest}; correct one of them"
            )
        return replace(part, min_pixels=lowest, max_pixels=highest)


AS_THEY_ARE = RowReading()
"""Rows in whatever format their columns tell, and nothing laid over them."""


def _templated(
    messages: tuple[Message, ...], record: Mapping[str, Any], *, template: PromptTemplate, location: str
) -> tuple[Message, ...]:
    """Return the messages with the last turn of the user written by the template, its images and videos where it says."""
    place = max((place for place, message in enumerate(messages) if message.role == "user"), default=None)
    if place is None:
        raise UserError(f"{location}: --data.prompt_template writes the turn of the user, and the row has none")
    message = messages[place]
    text = template.render(tagged_text(message), columns=record, location=location)
    written = replace(message, parts=parts_of(text, message, location=location))
    return (*messages[:place], written, *messages[place + 1 :])
