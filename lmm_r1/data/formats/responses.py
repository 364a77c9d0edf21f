"""Rows that hold a prompt with the response to it, or with a better and a worse one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmm_r1.data.formats.asked import CONVERSATIONS, IMAGES, PROMPTS, prompt_of
from lmm_r1.data.formats.chats import DATASOURCE, chat_message, response_text, written_messages
from lmm_r1.data.formats.preferences import sides
from lmm_r1.data.formats.problems import media_first
from lmm_r1.data.formats.row_format import NOTHING, Column, Columns, RowFields, RowFormat, filled

_RESPONSES = ("response", "completion", "output")


def _pairs(columns: Columns) -> RowFields:
    prompt = prompt_of(columns, images=columns.images(*IMAGES), names=PROMPTS)
    response = _turn(columns.take(*_RESPONSES), columns=columns)
    return _fields(columns, prompt=prompt, response=response)


def _preference(columns: Columns) -> RowFields:
    """Where there is no column with the prompt, it is what the two sides have in common."""
    prompt, better, worse = sides(columns, images=columns.images(*IMAGES))
    return _fields(
        columns,
        prompt=prompt,
        response=_turn(better, columns=columns),
        rejected=_turn(worse, columns=columns),
    )


def _fields(columns: Columns, *, prompt: Any, response: Column, rejected: Column = NOTHING) -> RowFields:
    images = columns.images(*IMAGES)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = [chat_message(turn) for turn in prompt]
    answer = columns.answer("answer")
    return RowFields(
        messages=media_first(prompt, images),
        answer=answer if answer.value is not None else Column(name=response.name, value=response_text(response.value)),
        images=images,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*DATASOURCE),
        response=response,
        rejected=rejected,
    )


def _turn(column: Column, *, columns: Columns) -> Column:
    """Return a response's text or message; of a list the one message that it holds."""
    value = chat_message(written_messages(column.value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            columns.fail(f'"{column.name}" must be text or one message, not a list of {len(value)}')
        value = chat_message(value[0])
    if not filled(value):
        columns.fail(f'the field "{column.name}" is empty; fill it in')
    if not isinstance(value, str) and not (isinstance(value, Mapping) and value.get("role") == "assistant"):
        columns.fail(f'"{column.name}" must be text or a message of the assistant')
    return Column(name=column.name, value=value)


RESPONSES = (
    RowFormat(
        name="pairs",
        source="prompt/response pairs",
        needs=(PROMPTS, _RESPONSES),
        without=("chosen", "rejected", *CONVERSATIONS),
        adapt=_pairs,
    ),
    RowFormat(
        name="preference",
        source="preferences",
        needs=(("chosen",), ("rejected",)),
        adapt=_preference,
    ),
)
