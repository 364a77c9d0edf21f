"""Rows with responses: prompt/response pairs, unpaired responses with labels, and labelled steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmm_r1.data.formats.chats import DATASOURCE, chat_message, response_text, with_surroundings, written_messages
from lmm_r1.data.formats.preferences import sides
from lmm_r1.data.formats.problems import CONVERSATIONS, IMAGES, PROMPTS, VIDEOS, media_first, prompt_of
from lmm_r1.data.formats.row_format import (
    NOTHING,
    Column,
    Columns,
    FormatSet,
    RowFields,
    RowFormat,
    StepFields,
    UnpairedFields,
    filled,
    is_empty,
)

_RESPONSES = ("response", "completion", "output")


def _pairs(columns: Columns) -> RowFields:
    prompt = prompt_of(columns, images=columns.images(*IMAGES), names=PROMPTS)
    response = _turn(columns.take(*_RESPONSES), columns=columns)
    return _fields(columns, prompt=prompt, response=response)


def _preference(columns: Columns) -> RowFields:
    """Without a prompt column, the common beginning of the two sides is the prompt."""
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
    """Return a response's text or message; a list must hold exactly one message."""
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


_UNPAIRED_RESPONSES = ("completion", "response", "output")
_UNPAIRED_LABELS = ("kto_tag", "label")


def _unpaired(columns: Columns) -> UnpairedFields:
    """The response has its own column, or is the conversation's last turn."""
    images = columns.images(*IMAGES)
    prompt = prompt_of(columns, images=images)
    named = columns.names.response
    response = columns.take(*(_UNPAIRED_RESPONSES if named is None else (named,)))
    response = replace(response, value=written_messages(response.value))
    if response.value is None and named is None:
        prompt, response = _last(prompt, response, columns=columns)
    label = columns.answer(*_UNPAIRED_LABELS)
    return UnpairedFields(
        messages=prompt,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=response,
        label=label,
    )


def _last(prompt: Any, empty: Column, *, columns: Columns) -> tuple[Any, Column]:
    """Return a conversation without its last turn, and that turn; raises UserError if there is none."""
    prompt = written_messages(prompt)
    turns = [] if isinstance(prompt, str) or not isinstance(prompt, Sequence) else list(map(chat_message, prompt))
    if len(turns) < 2 and empty.name in columns.record:
        columns.fail(f'the field "{empty.name}" is empty; fill it in')
    if len(turns) < 2:
        columns.fail(
            f"no field {' or '.join(_UNPAIRED_RESPONSES)} with the response (found: {', '.join(columns.record)}), and no conversation "
            f'that ends with it in "{columns.prompt_column}"'
        )
    return turns[:-1], Column(name=columns.prompt_column, value=turns[-1:])


_UNPAIRED = RowFormat(
    name="unpaired",
    source="TRL's unpaired preference",
    needs=(("prompt",), ("completion",), ("label",)),
    without=("chosen", "rejected", "kto_tag"),
    adapt=_unpaired,
)
UNPAIRED_ROWS = FormatSet(
    formats=(
        _UNPAIRED,
        RowFormat(
            name="kto",
            source="rows with a KTO tag",
            needs=((*PROMPTS, *CONVERSATIONS), ("kto_tag",)),
            without=("chosen", "rejected"),
            adapt=_unpaired,
        ),
    ),
    own=_UNPAIRED,
)
"""Rows that KTO trains on."""


STEP_TAG = "ки"
"""Math-Shepherd's tag after every step, used if the user names no other."""
_STEP_LABELS = ("label", "labels", "value", "values")
# The only mark of where the question ends in a text that holds both.
_FIRST_STEP = re.compile(r"(?:^|(?<=\s))Step 1\s*:")


def _stepwise(columns: Columns) -> StepFields:
    """The steps and their labels are two lists."""
    if is_empty(columns.record.get("completions")) and _tagged_column(columns) is not None:
        return _tagged(columns)
    images = columns.images(*IMAGES)
    return StepFields(
        messages=prompt_of(columns, images=images),
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE, "task"),
        steps=columns.take("completions"),
        labels=columns.answer("labels", "label"),
    )


def _tagged_column(columns: Columns) -> str | None:
    """Return the column that holds both question and steps."""
    names = ("input",) if columns.names.prompt is None else (columns.names.prompt,)
    return next((name for name in names if not is_empty(columns.record.get(name))), None)


def _tagged(columns: Columns) -> StepFields:
    """A tag follows each step; the labels are a list, or the same text with a sign instead of each tag."""
    images, tag = columns.images(*IMAGES), columns.names.step_tag or STEP_TAG
    text, before = _solution(columns, columns.prompt("input"))
    *steps, rest = text.split(tag)
    if not steps:
        columns.fail(
            f'no step in "{columns.prompt_column}" ends with the tag "{tag}"; write it after each step, or name the tag with {columns.names.step_flag}'
        )
    # In an earlier version of Math-Shepherd, steps have a question mark where the labels have their signs.
    steps = [step.strip().removeprefix("?").strip() for step in steps]
    if rest.strip() not in ("", "?"):
        columns.fail(f'the text ends with {_short(rest)}, and no tag "{tag}" follows; write the tag after every step')
    labels = columns.answer(*_STEP_LABELS)
    if isinstance(labels.value, str):
        labels = Column(
            name=labels.name, value=_signs(labels.value, steps, tag=tag, columns=columns, name=labels.name)
        )
    if before is None:
        question, steps[0] = _split_question(steps[0], columns=columns)
        before = with_surroundings(media_first(question, images), columns=columns)
    return StepFields(
        messages=before,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE, "task"),
        steps=Column(name="input", value=steps),
        labels=labels,
    )


def _solution(columns: Columns, value: Any) -> tuple[str, Any]:
    """Return the text with the tags, and the messages before it if it is the last turn of a conversation."""
    if isinstance(value, str):
        return value, None
    turns = list(map(chat_message, value)) if isinstance(value, Sequence) else []
    last = turns[-1] if len(turns) > 1 and isinstance(turns[-1], Mapping) else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str):
        columns.fail(
            f'the steps in "{columns.prompt_column}" must be a text, or a conversation whose last turn is the assistant\'s and '
            "holds them as text"
        )
    return content, with_surroundings(turns[:-1], columns=columns)


def _split_question(text: str, *, columns: Columns) -> tuple[str, str]:
    """`"How many? Step 1: Two."` → `"How many?"`, `"Step 1: Two."`."""
    found = list(_FIRST_STEP.finditer(text))
    if not found or not text[: found[-1].start()].strip():
        columns.fail(
            'it is unclear where the question ends and the steps begin; begin the first step with "Step 1:", or put '
            "prompt, completions and labels into separate columns"
        )
    start = found[-1].start()
    return text[:start].strip(), text[start:].strip()


def _signs(text: str, steps: Sequence[str], *, tag: str, columns: Columns, name: str) -> list[str]:
    """Return the sign after each step, from a text that repeats the steps."""
    rest, signs = text.lstrip(), []
    for number, step in enumerate(steps, start=1):
        if not rest.startswith(step):
            columns.fail(
                f'"{name}" does not repeat step {number} of {len(steps)}, {_short(step)}; correct one of them'
            )
        sign, _, rest = rest[len(step) :].lstrip().removeprefix(tag).lstrip().partition("\n")
        head, *tail = sign.split(maxsplit=1)[:2] or [""]
        signs.append(head)
        rest = "\n".join([*tail, rest]).lstrip()
    if rest:
        columns.fail(
            f'"{name}" continues with {_short(rest)} after the last of {len(steps)} steps; correct one of them'
        )
    return signs


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


_STEPS = RowFormat(
    name="stepwise",
    source="TRL's stepwise supervision",
    needs=(PROMPTS, ("completions",), ("labels",)),
    without=("chosen", "rejected"),
    adapt=_stepwise,
)
STEP_ROWS = FormatSet(
    formats=(
        _STEPS,
        RowFormat(
            name="math_shepherd",
            source="Math-Shepherd",
            needs=(("input",), _STEP_LABELS),
            without=("chosen", "rejected", "completions", "output", "response", *PROMPTS, *CONVERSATIONS),
            adapt=_tagged,
        ),
    ),
    own=_STEPS,
)
"""Rows that process reward models train on."""
