"""From what a format has found of judged responses to turns, labels and scores, every one checked, every error with its place."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from lmm_r1.data.formats.chats import chat_message
from lmm_r1.data.formats.row_format import Column, is_empty
from lmm_r1.data.messages import ImagePart, Message, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.row_parser import RecordParser

_YES = ("true", "1", "1.0", "+")
_NO = ("false", "0", "0.0", "-")


class JudgedParser(RecordParser):
    """Reads a record whose responses are judged."""

    def asked(self, value: Any, *, plain_template: str | None) -> tuple[tuple[Message, ...], bool]:
        """Return the prompt, and whether it is plain text; it must end with what is to be answered."""
        messages, plain = self.prompt(value, plain_template=plain_template)
        if messages[-1].role not in ("user", "tool"):
            self.fail(
                f'the prompt "{self.prompt_column}" ends with a turn of the role {messages[-1].role}; it must end with what is '
                "answered"
            )
        return messages, plain

    def continuation(self, column: Column) -> tuple[Message, ...]:
        """Return the turns of a response, the first and the last of them the assistant's; a text is one turn."""
        value = chat_message(column.value)
        if isinstance(value, (str, numbers.Number)) and not isinstance(value, bool):
            value = {"role": "assistant", "content": str(value)}
        turns = [value] if isinstance(value, Mapping) else value
        if is_empty(turns):
            self.fail(f'the field "{column.name}" is empty; fill it in')
        if isinstance(turns, bytes) or not isinstance(turns, Sequence):
            self.fail(f'"{column.name}" must be a text or a list of messages, not {type(turns).__name__}')
        messages = tuple(
            self.message(chat_message(turn), where=f'"{column.name}"{"" if len(turns) == 1 else f" message {number}"}')
            for number, turn in enumerate(turns, start=1)
        )
        if messages[0].role != "assistant" or messages[-1].role != "assistant":
            other = next(message.role for message in (messages[0], messages[-1]) if message.role != "assistant")
            self.fail(f'"{column.name}" must begin and end with a turn of the assistant, not of the role {other}')
        return messages

    def check_pair(self, chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
        """Raise UserError where two responses are the same, or only one of them has images or videos."""
        if _essence(chosen) == _essence(rejected):
            self.fail(
                "chosen and rejected are the same, so neither is the better; correct one of them, or leave the row out"
            )
        for kind, of in (("image", images_of), ("video", videos_of)):
            counts = len(of(chosen)), len(of(rejected))
            if 0 in counts and counts != (0, 0):
                side = "chosen" if counts[0] else "rejected"
                self.fail(
                    f"the response {side} has {max(counts)} {kind}s and the other one none; put what both see into the "
                    "prompt, or on both sides"
                )

    def score(self, column: Column) -> float | None:
        """Return a number, None where there is none."""
        if is_empty(column.value):
            return None
        number = _number(column.value)
        if number is None:
            self.fail(f'"{column.name}" is {_short(column.value)}; a finite number is needed, or nothing')
        return number

    def margin(self, given: Column, better: Column, worse: Column) -> float | None:
        """Return by how much a response is the better: what a column says, else what the scores of both differ by."""
        margin, high, low = self.score(given), self.score(better), self.score(worse)
        name = f'"{given.name}"'
        if margin is None and high is not None and low is not None:
            margin, name = high - low, f'"{better.name}" less "{worse.name}"'
        if margin is not None and margin < 0:
            self.fail(
                f"{name} is {margin:g}, so the rejected response would be the better; swap the two, or correct it"
            )
        return margin

    def desirable(self, column: Column) -> bool:
        """Return whether a response is to be learned."""
        value = _label(column.value)
        if value not in (0.0, 1.0):
            self.fail(
                f'the label "{column.name}" is {_short(column.value)}; true (desirable) or false (undesirable) is needed'
            )
        return value == 1.0

    def steps(self, column: Column) -> tuple[str, ...]:
        """Return the texts of the steps, without blanks around them."""
        value = column.value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
            self.fail(f'"{column.name}" must be a list with at least one step')
        steps = []
        for number, step in enumerate(value, start=1):
            if not isinstance(step, str) or not step.strip():
                self.fail(
                    f'step {number} of {len(value)} in "{column.name}" is empty or no text; fill it in, or leave it out with its label'
                )
            self.check_characters(step, where=f'step {number} of "{column.name}"')
            steps.append(step.strip())
        return tuple(steps)

    def step_labels(self, column: Column, *, count: int) -> tuple[float, ...]:
        """Return the labels of `count` steps, from 0 (wrong) to 1 (right)."""
        value = column.value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            self.fail(f'the field "{column.name}" must be a list with a label for each step')
        if len(value) != count:
            self.fail(f'"{column.name}" has {len(value)} labels for {count} steps; each step needs one')
        labels = []
        for number, given in enumerate(value, start=1):
            label = _label(given)
            if label is None or not 0 <= label <= 1:
                self.fail(
                    f'the label of step {number} in "{column.name}" is {_short(given)}; true or false, + or -, or a number from 0 to 1 '
                    "is needed"
                )
            labels.append(label)
        return tuple(labels)


def _label(value: Any) -> float | None:
    """Return 1.0 for what says yes, 0.0 for what says no, a number as it is, None for anything else."""
    text = str(value).strip().lower()
    return 1.0 if text in _YES else 0.0 if text in _NO else _number(value)


def _number(value: Any) -> float | None:
    """Return a finite number, also one that a table holds as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _essence(messages: Sequence[Message]) -> list[object]:
    """Return what makes responses differ: roles, texts less the blanks around them, and media."""
    found: list[object] = []
    for message in messages:
        found.append(
            (message.role, "".join(part.text for part in message.parts if isinstance(part, TextPart)).strip())
        )
        found += [part for part in message.parts if isinstance(part, (ImagePart, VideoPart))]
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
