"""Rows that hold the steps of a solution with a label each: TRL's stepwise supervision, Math-Shepherd's, OpenRLHF's train_prm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmm_r1.data.formats.asked import CONVERSATIONS, IMAGES, PROMPTS, VIDEOS, prompt_of
from lmm_r1.data.formats.chats import DATASOURCE, chat_message, with_surroundings
from lmm_r1.data.formats.problems import media_first
from lmm_r1.data.formats.row_format import Column, Columns, FormatSet, RowFormat, StepFields, is_empty

STEP_TAG = "ки"
"""What Math-Shepherd writes behind every step, where the user names nothing else."""
_LABELS = ("label", "labels", "value", "values")
# Only this tells where the question ends in a text that holds both.
_FIRST_STEP = re.compile(r"(?:^|(?<=\s))Step 1\s*:")


def _stepwise(columns: Columns) -> StepFields:
    """The steps are a list of texts beside a list of labels."""
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
    """Return the column in which question and steps stand together."""
    names = ("input",) if columns.names.prompt is None else (columns.names.prompt,)
    return next((name for name in names if not is_empty(columns.record.get(name))), None)


def _tagged(columns: Columns) -> StepFields:
    """A tag stands behind each step; the labels are a list, or the same text with a sign in the place of each tag."""
    images, tag = columns.images(*IMAGES), columns.names.step_tag or STEP_TAG
    text, before = _solution(columns, columns.prompt("input"))
    *steps, rest = text.split(tag)
    if not steps:
        columns.fail(
            f'no step in "{columns.prompt_column}" ends with the tag "{tag}"; write it behind each step, or name the tag with {columns.names.step_flag}'
        )
    # An earlier form of Math-Shepherd has a question mark where the labels have their signs.
    steps = [step.strip().removeprefix("?").strip() for step in steps]
    if rest.strip() not in ("", "?"):
        columns.fail(
            f'the text ends with {_short(rest)}, which no tag "{tag}" follows; write the tag behind every step'
        )
    labels = columns.answer(*_LABELS)
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
    """Return the text with the tags, and the messages before it where it is the last turn of a conversation."""
    if isinstance(value, str):
        return value, None
    turns = list(map(chat_message, value)) if isinstance(value, Sequence) else []
    last = turns[-1] if len(turns) > 1 and isinstance(turns[-1], Mapping) else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str):
        columns.fail(
            f'the steps in "{columns.prompt_column}" must be a text, or a conversation that ends with them as the text of the '
            "assistant"
        )
    return content, with_surroundings(turns[:-1], columns=columns)


def _split_question(text: str, *, columns: Columns) -> tuple[str, str]:
    """`"How many? Step 1: Two."` → `"How many?"`, `"Step 1: Two."`."""
    found = list(_FIRST_STEP.finditer(text))
    if not found or not text[: found[-1].start()].strip():
        columns.fail(
            'nothing tells where the question ends and the steps begin; begin the first step with "Step 1:", or give '
            "prompt, completions and labels in columns of their own"
        )
    start = found[-1].start()
    return text[:start].strip(), text[start:].strip()


def _signs(text: str, steps: Sequence[str], *, tag: str, columns: Columns, name: str) -> list[str]:
    """Return what stands behind each step in a text that repeats the steps."""
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
            f'"{name}" goes on with {_short(rest)} behind the last of {len(steps)} steps; correct one of them'
        )
    return signs


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


_OWN = RowFormat(
    name="stepwise",
    source="TRL's stepwise supervision",
    needs=(PROMPTS, ("completions",), ("labels",)),
    without=("chosen", "rejected"),
    adapt=_stepwise,
)
STEP_ROWS = FormatSet(
    formats=(
        _OWN,
        RowFormat(
            name="math_shepherd",
            source="Math-Shepherd",
            needs=(("input",), _LABELS),
            without=("chosen", "rejected", "completions", "output", "response", *PROMPTS, *CONVERSATIONS),
            adapt=_tagged,
        ),
    ),
    own=_OWN,
)
"""What process reward models learn from."""
