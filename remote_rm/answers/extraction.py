r"""Finds the final answer in a response.

It is the answer block, else the last \boxed{}, else the last stated value. Thinking is cut off first. A block that was
never closed runs to the end; if the thinking was not closed either, the last answer block ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from remote_rm.answers.lexer import Match, Token, introductions, span_content
from remote_rm.answers.reading import closing_brace
from remote_rm.answers.statement import (
    clause_of,
    in_one_line,
    is_plain,
    is_prose,
    measured,
    read,
    unit_in_prose,
    words_of,
)
from remote_rm.answers.wording import (
    from_code,
    in_english,
    in_formulas,
    is_copied,
    without_layout,
    without_sign_off,
    without_struck_out,
)

MAX_TAIL_CHARS = 2000
"""How much of a response without an answer block and without a box is searched for a stated value, from its end."""
MAX_BOXES = 20
"""How many boxes are looked at, from the last one back, before the response counts as having none."""
MAX_BOX_CHARS = 2000
"""The length from which on a box counts as never closed."""

MAX_END_CHARS = 400
"""How much of that is looked through first for an introduction of the answer."""
MAX_CHARS_BEFORE = 120
"""How far in front of an introduction its own line is read."""
MAX_NAME_WORDS = 6
"""Up to how many words a last line without a verb and without a number counts as a name."""

USER_TURN = "<|im_start|>user"


def final_answer(response: str) -> str | None:
    """Return the final answer as written, or None if the response states none."""
    # What follows a marker is a turn that the response writes for the user.
    conclusion = without_thinking(response).partition(USER_TURN)[0]
    block = _last_answer_block(conclusion)
    if block is not None:
        boxed = _boxed_with_unit(block)
        return block.strip() if boxed is None else boxed
    boxed = _boxed_with_unit(conclusion)
    if boxed is not None:
        return boxed
    text = in_english(without_sign_off(without_struck_out(conclusion[-MAX_TAIL_CHARS:]).strip()))
    value = _last_stated_value(text)
    if value is not None and Token.NUMBER_IN_DOLLARS.fullmatch(value):
        before, opening, opened = text[: text.rfind(value)].rpartition("$")
        if opening and before.count("$") % 2 == 0 and not opened[:1].isdigit():
            # A formula is open there, so this sign is the currency's: `$surely not 5 yuan? The answer is $5.$`
            return value.rstrip("$")
    return value


def concluding_text(response: str) -> str | None:
    r"""Return the last answer block, or else all that stands outside the thinking; of either the last box, if it has one.

    For answers that may have many lines, such as a list of objects. None if that is no text.
    """
    conclusion = without_thinking(response)
    block = _last_answer_block(conclusion)
    text = conclusion if block is None else block
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip() or None


def without_thinking(response: str) -> str:
    """Return the text outside the think blocks; a block that was never opened or never closed is cut too.

    Of thinking that was never closed, the text from the last complete answer block on is kept.
    """
    outside, position = [], 0
    while (start := response.find("<think>", position)) >= 0:
        outside.append(response[position:start])
        end = response.find("</think>", start)
        if end < 0:
            block = response.rfind("<answer>", start)
            outside.append(response[block:] if 0 <= block < response.rfind("</answer>") else "")
            break
        position = end + len("</think>")
    else:
        outside.append(response[position:])
    return " ".join(outside).rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, or None.

    `\boxed{\frac{1}{2}} or \boxed{3}` → `3`
    """
    place = _last_box(text)
    return None if place is None else text[slice(*place)].strip()


def _boxed_with_unit(text: str) -> str | None:
    r"""The last box with the unit after it: `\boxed{12} cm` → `12 cm`; boxes that are joined, as a list."""
    place = _last_box(text)
    if place is None:
        return None
    boxed = text[slice(*place)].strip()
    unit = unit_in_prose(text, place[1] + 1) if is_plain(boxed) else ""
    listed = [boxed]
    while len(listed) < MAX_BOXES:
        start = text.rfind("\\", 0, place[0])
        before = _last_box(text, end=start)
        between = None if before is None else Token.BETWEEN_BOXES.fullmatch(text, before[1] + 1, start)
        if before is None or between is None:
            break
        place, listed = before, [text[slice(*before)].strip(), *listed]
    if len(set(listed)) > 1:
        return ", ".join(listed)
    return f"{boxed} {unit}" if unit else boxed


def _last_box(text: str, *, end: int | None = None) -> tuple[int, int] | None:
    """Where the content of the last complete box before `end` starts and ends."""
    end = len(text) if end is None else end
    for _ in range(MAX_BOXES):
        end = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        opening = Token.BOX.match(text, max(end, 0))
        closing = None if opening is None else closing_brace(text, start=opening.end(), longest=MAX_BOX_CHARS)
        if opening is not None and closing is not None:
            return opening.end(), closing
        if end <= 0:
            break
    return None


def _last_answer_block(text: str) -> str | None:
    """The content of the last block that has any; a block that was never closed runs to the end."""
    start, end = text.rfind("<answer>"), text.rfind("</answer>")
    if start > end and not text[start + len("<answer>") :].strip() and end >= 0:
        start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") :].partition("</answer>")[0] if start >= 0 else None


def _last_stated_value(text: str) -> str | None:
    """What the end of a text without an answer block and without a box states."""
    if (value := from_code(text)) != text:
        return value
    # A response ends in its answer: its last lines are looked through first.
    for end in (text[-MAX_END_CHARS:], text) if len(text) > MAX_END_CHARS else (text,):
        if introductions(end):
            end = in_one_line(end)
            return _introduced(end, introductions(end))
    is_question = is_copied(text)
    text = in_one_line(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or is_question or len({line[:4] for line in lines[-2:] if Token.OPTION_LINE.fullmatch(line)}) > 1:
        return None
    last = without_layout(lines[-1])
    if Token.IGNORANCE.search(last):
        return None
    if (formula := in_formulas(last)) != last or Token.STANCE.search(last):
        return formula
    if Token.OPTION_LINE.fullmatch(lines[0]) and not any(map(Token.OPTION_LINE.fullmatch, lines[1:])):
        return lines[0]
    # "42", "B", "yes", "x = 5" are values as they are; "so 42" and "12 apples" are not.
    if not is_prose(last) and not (words_of(last) and Token.DIGIT_OR_DOLLAR.search(last)):
        # `2x + y = 0` says something of letters; in `x = 5`, x is what the value is called.
        left, _, right = last.strip(" $*.").partition("=")
        is_named = Token.VALUE_NAME.fullmatch(left.strip()) is not None
        is_equation = not is_named and "=" not in right and Token.LETTER_TERM.search(left)
        is_whole = last.count("=") > 1 or is_equation or set("<>") & set(last)
        return (last if is_whole else last.rpartition("=")[2].strip()) or None
    return _of_line(last, text)


def _introduced(text: str, introduced: Sequence[Match]) -> str:
    """The text from the line of the last introduction on."""
    last = introduced[-1]
    if not text[last.end() :].strip(" *_:\n") and len(introduced) > 1:
        last = introduced[-2]
    start = text.rfind("\n", 0, last.start() + 1) + 1
    segment = text[max(start, last.start() - MAX_CHARS_BEFORE) :]
    clause = clause_of(segment)
    return segment if clause is None else clause.strip(" *\t").rstrip("。.").strip(" *\t")


def _of_line(line: str, text: str) -> str | None:
    """What the last line states: the value that is read from it, the line if it is words, else the last value of all."""
    if any(sign.search(line) for sign in (Token.OPEN_END, Token.DENIED, Token.LEFT_OPEN, Token.BOUND, Token.OR)):
        return line
    stated = read(line)
    if stated.value:
        return stated.value
    if Token.VERB.search(line):
        return line
    found = [(match.end(), span_content(match)) for match in Token.FORMULA.finditer(text)]
    found += [(match.end(), match.group()) for match in Token.NUMBER.finditer(text)]
    if not found:
        return line if len(line.split()) <= MAX_NAME_WORDS or ": " in line else None
    end, value = max(found)
    unit = unit_in_prose(text, end) if is_plain(value) else ""
    return f"{value} {unit}" if unit else measured(value, line) or line
