"""The row formats by name, detection of a file's format, and the formats of rows with one question.

A new format is a `RowFormat` in the registry, its name in `config.shared.FormatName`, and a sample in `datasets/samples/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from lmm_r1.data.formats.chats import (
    CHATS,
    DATASOURCE,
    MESSAGES,
    chat_message,
    gold_answer,
    media_first,
    response_text,
    with_system,
    written_messages,
)
from lmm_r1.data.formats.row_format import (
    Column,
    ColumnNames,
    Columns,
    Fields,
    Record,
    RowFields,
    RowFormat,
    Unreadable,
    as_thought,
    is_empty,
)
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file, load_user_function

PROMPTS = ("prompt", "question", "query", "instruction", "problem")
CONVERSATIONS = (*MESSAGES, "conversations")
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
_RESPONSES = ("response", "completion", "output")
# Elsewhere, a label may be the verdict on a response.
_ANSWERS = ("answer", "label")
_GROUND_TRUTH = "reward_model.ground_truth"


def prompt_of(columns: Columns, *, images: Column, names: tuple[str, ...] = PROMPTS) -> Any:
    """Return the prompt in one of these columns, followed by alpaca's `input` and preceded by `system`.

    Raises:
        UserError: there is none, or the other columns cannot be combined with it.
    """
    written = columns.record.get("prompt")
    if "prompt" in names and not is_empty(written) and not isinstance(written_messages(written), str):
        # The other columns are what TRL's scripts made the messages of.
        names = ("prompt",)
    prompt = columns.prompt(*names)
    if columns.names.prompt != "input" and (more := columns.text("input")) is not None:
        if not isinstance(prompt, str):
            columns.fail(
                f'"input" requires a prompt that is text; put it into "{columns.prompt_column}", and empty "input"'
            )
        prompt = f"{prompt}\n{more}"
    return with_system(media_first(prompt, images), columns=columns)


def _flat(columns: Columns) -> RowFields:
    """A question with its answer, under the usual names for both; SFT trains on the solution, if there is one."""
    images = columns.images(*IMAGES)
    prompt = prompt_of(columns, images=images)
    answer, solution = gold_answer(columns, *_ANSWERS), columns.take("solution")
    worked = solution if solution.value is not None else columns.answer(*_ANSWERS)
    return RowFields(
        messages=prompt,
        answer=answer,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=_with_thought(columns, worked),
    )


def _verl(columns: Columns) -> RowFields:
    images = columns.images(*IMAGES)
    prompt = prompt_of(columns, images=images, names=("prompt",))
    judged = columns.take("reward_model").value
    if judged is not None and not isinstance(judged, Mapping):
        columns.fail('the field "reward_model" must be an object with "ground_truth"; correct it')
    answer = columns.answer(_GROUND_TRUTH)
    if isinstance(answer.value, list | dict):
        answer = replace(answer, value=json.dumps(answer.value, ensure_ascii=False))
    response = columns.take(*_RESPONSES)
    return RowFields(
        messages=prompt,
        answer=answer,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=answer if response.value is None else response,
    )


def _pairs(columns: Columns) -> RowFields:
    images = columns.images(*IMAGES)
    prompt, response = prompt_of(columns, images=images), _response(columns)
    answer = gold_answer(columns, "answer")
    return RowFields(
        messages=prompt,
        answer=answer if answer.value is not None else replace(response, value=response_text(response.value)),
        images=images,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*DATASOURCE),
        response=_with_thought(columns, response),
    )


def _with_thought(columns: Columns, response: Column) -> Column:
    """Return a response after the thought in a column of its own, as R1-V's traces have it."""
    thought = columns.text("thinking", "reasoning_content")
    if thought is None or is_empty(response.value):
        return response
    if isinstance(response.value, Mapping):
        return replace(response, value={"thinking": thought, **response.value})
    return replace(response, value=f"{as_thought(thought)}\n\n{response.value}")


def _response(columns: Columns) -> Column:
    """Return the response's text or message; a list must hold exactly one message."""
    column = columns.take(*_RESPONSES)
    value = chat_message(written_messages(column.value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            columns.fail(f'"{column.name}" must be text or one message, not a list of {len(value)}')
        value = chat_message(value[0])
    if is_empty(value):
        columns.fail(f'the field "{column.name}" is empty; fill it in')
    if not isinstance(value, str) and not (isinstance(value, Mapping) and value.get("role") == "assistant"):
        columns.fail(f'"{column.name}" must be text or a message of the assistant')
    return replace(column, value=value)


PROBLEMS = (
    RowFormat(name="verl", source="verl", needs=(("prompt",), ("reward_model",)), without=CONVERSATIONS, adapt=_verl),
    RowFormat(
        name="flat",
        source="questions with answers",
        needs=(PROMPTS, (*_ANSWERS, "solution")),
        without=(*_RESPONSES, "reward_model", *CONVERSATIONS),
        adapt=_flat,
    ),
    RowFormat(
        name="pairs",
        source="prompt/response pairs",
        needs=(PROMPTS, _RESPONSES),
        without=("reward_model", *CONVERSATIONS),
        adapt=_pairs,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FormatSet(Generic[Fields]):
    """The formats of one kind of rows."""

    formats: tuple[RowFormat[Fields], ...]
    own: RowFormat[Fields]
    """The format of files that fit none, and of files whose columns the user named."""
    refused: tuple[frozenset[str], ...] = ()
    """Sets of columns by which a file also holds undesirable responses."""
    keys: tuple[str, ...] = ()
    """The flags that name columns, for the error about a file that fits no format; without them it is read as `own`."""

    def find(self, columns: Iterable[str], *, file: str, named: ColumnNames | None = None) -> RowFormat[Fields]:
        """Return the format of a file with these columns.

        Args:
            named: the columns that the user named; that of the answer indicates no format.

        Raises:
            UserError: several formats fit, one of another kind, or none.
        """
        names, named = set(columns), named or ColumnNames()
        choose = named.flag("format")
        for columns in self.refused:
            if columns <= names - {named.answer}:
                raise UserError(
                    f"{file}: by its columns {', '.join(sorted(columns))} it also holds undesirable responses; train on pairs "
                    f"with train_dpo, or leave these rows out and choose how to read the others with {choose}"
                )
        fitting = [one for one in self.formats if one.fits(names)]
        if not fitting and named.answer is not None and names & {named.answer, named.answer.partition(".")[0]}:
            fitting = [one for one in self.formats if one.fits(names | {"answer"})]
        if len(fitting) > 1:
            choices = " and ".join(f"{row_format.name} ({row_format.wants})" for row_format in fitting)
            raise UserError(f"{file}: its columns fit the row formats {choices}; choose one with {choose}")
        if not fitting and self.keys and names.isdisjoint(self.own.needs[0]):
            shapes = "; ".join(f"{row_format.name} ({row_format.wants})" for row_format in self.formats)
            raise UserError(
                f"{file}: its columns ({', '.join(sorted(names)) or 'none'}) are those of no known row format. Name the "
                f"columns with {', '.join(map(named.flag, self.keys))}, or rename them. The formats and their columns: {shapes}"
            )
        return fitting[0] if fitting else self.own

    def named(self, name: str, *, file: str, names: ColumnNames | None = None) -> RowFormat[Fields]:
        """Return the format of this name, or of `FILE.py:NAME`; raises UserError if this kind of rows does not come in it."""
        flag = (names or ColumnNames()).flag("format")
        if function_file(name):
            function = load_user_function(name, default="read_row", flag=flag)

            def each(record: Record) -> Record:
                columns, location, folder = record
                if isinstance(columns, Unreadable):
                    return record
                try:
                    made = function(columns)
                    if not isinstance(made, dict):
                        raise UserError(f"{flag} {name}: return a dict of columns, not {type(made).__name__}")
                except UserError as error:
                    made = Unreadable(UserError(f"{location}: {error}"))
                return made, location, folder

            return replace(self.own, name=name, each=each)
        for row_format in self.formats:
            if row_format.name == name:
                return row_format
        known = ", ".join(row_format.name for row_format in self.formats)
        raise UserError(f"{file}: {flag} {name} is for another kind of rows; the formats for this one are {known}")


FORMATS: dict[str, RowFormat[RowFields]] = {one.name: one for one in (*CHATS, *PROBLEMS)}
OWN = FORMATS["lmm_r1"]
"""The format of this project's own rows, and of files whose prompt column the user named."""
_KEYS = ("input_key", "label_key", "image_key")
_VERDICTS = tuple(map(frozenset, (("chosen", "rejected"), ("prompt", "completion", "label"), ("kto_tag",))))
PROMPT_ROWS = FormatSet(formats=tuple(FORMATS.values()), own=OWN, refused=_VERDICTS, keys=_KEYS)
"""Rows that RL samples from and SFT trains on."""
