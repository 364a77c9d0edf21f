"""Rows with one response and whether it is desirable: TRL's unpaired preference; ShareGPT's and alpaca's with a KTO tag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmm_r1.data.formats.asked import CONVERSATIONS, IMAGES, PROMPTS, VIDEOS, prompt_of
from lmm_r1.data.formats.chats import DATASOURCE, chat_message, written_messages
from lmm_r1.data.formats.row_format import Column, Columns, FormatSet, RowFormat, UnpairedFields

_RESPONSES = ("completion", "response", "output")
_LABELS = ("kto_tag", "label")


def _unpaired(columns: Columns) -> UnpairedFields:
    """The response has a column of its own, or is the conversation's last turn."""
    images = columns.images(*IMAGES)
    prompt = prompt_of(columns, images=images)
    named = columns.names.response
    response = columns.take(*(_RESPONSES if named is None else (named,)))
    response = replace(response, value=written_messages(response.value))
    if response.value is None and named is None:
        prompt, response = _last(prompt, response, columns=columns)
    label = columns.answer(*_LABELS)
    return UnpairedFields(
        messages=prompt,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=response,
        label=label,
    )


def _last(prompt: Any, empty: Column, *, columns: Columns) -> tuple[Any, Column]:
    """Return a conversation without its last turn, and that turn; raises UserError where there is none."""
    prompt = written_messages(prompt)
    turns = [] if isinstance(prompt, str) or not isinstance(prompt, Sequence) else list(map(chat_message, prompt))
    if len(turns) < 2 and empty.name in columns.record:
        columns.fail(f'the field "{empty.name}" is empty; fill it in')
    if len(turns) < 2:
        columns.fail(
            f"no field {' or '.join(_RESPONSES)} with the response (found: {', '.join(columns.record)}), and no conversation "
            f'that ends with it in "{columns.prompt_column}"'
        )
    return turns[:-1], Column(name=columns.prompt_column, value=turns[-1:])


_OWN = RowFormat(
    name="unpaired",
    source="TRL's unpaired preference",
    needs=(("prompt",), ("completion",), ("label",)),
    without=("chosen", "rejected", "kto_tag"),
    adapt=_unpaired,
)
UNPAIRED_ROWS = FormatSet(
    formats=(
        _OWN,
        RowFormat(
            name="kto",
            source="rows with a KTO tag",
            needs=((*PROMPTS, *CONVERSATIONS), ("kto_tag",)),
            without=("chosen", "rejected"),
            adapt=_unpaired,
        ),
    ),
    own=_OWN,
)
"""What KTO learns from."""
