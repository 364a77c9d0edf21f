"""Rows with one question: problems with labels, prompts with responses, and how their prompts are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmm_r1.data.formats.chats import (
    DATASOURCE,
    MESSAGES,
    chat_message,
    gold_answer,
    media_first,
    response_text,
    with_system,
    written_messages,
)
from lmm_r1.data.formats.row_format import Column, Columns, RowFields, RowFormat, is_empty

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
    # R1-V's traces.
    if (thinking := columns.text("thinking")) is not None and not is_empty(worked.value):
        worked = replace(worked, value=f"{thinking}\n\n{worked.value}")
    return RowFields(
        messages=prompt,
        answer=answer,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=worked,
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
        response=response,
    )


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
