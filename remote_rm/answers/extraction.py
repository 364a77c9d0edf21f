r"""Finds the final answer in a response: the answer block, else the last \boxed{}, else the last stated value.

The thinking is cut off first: what a model wrote while it was thinking is no answer.
A block that was never closed runs to the end; where the thinking was not closed either, the last answer block ends it.
The format that the model is taught is one think block, then one answer block.
"""

import re

from remote_rm.answers.normalization import without_environments
from remote_rm.answers.quantity import parse_number_words
from remote_rm.answers.sentence import bold_end, complement, unit_in_prose

MAX_TAIL_CHARS = 2000
"""How much of a response without an answer block and without a box is searched for a stated value, from its end."""
MAX_BOXES = 20
"""How many boxes are looked at, from the last one back, before the response counts as having none."""
MAX_BOX_CHARS = 2000
"""The length from which on a box counts as never closed."""
MAX_PLAIN_CHARS = 100

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LAYOUT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MATH_SPAN = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,/])-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+|\s?\\?%)?(?![\w/]|[.,]\d)")
_PLAIN_VALUE = re.compile(
    r"[-+]?(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*\d(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*"
)
_ANSWER_CLAUSE = re.compile(
    r"(?:\b(?:answer|option|choice)\b\W{0,4}(?:\s*(?:is|are|=|:))+(?:\s*:)?|####|答案\s*(?:是|为)?\s*[：:]?(?<=[是为：:])|故选\s*[：:]?)"
    r"[*_\s]{0,5}([^\n]{1,300})",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"\b(?:at least|at most|(?:more|less|greater|fewer|other|larger|smaller) than|not|never|divisible by)"
    r"[\s:]+(?:\$|\\\(|-)?[\d\\]"
    r"|\bor (?:more|less|fewer|greater)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<!\b[ap]\.m)[.?。](?=\s|[*$]*$)|(?<![\w)!}])!(?=\s|$)|(?<=[a-z]{2})!(?=\s|$)")
_OPTION_LINE = re.compile(r"(?:\([A-J]\)|\*{0,2}[A-J][.):])\s.{1,200}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_NO_NUMBERS = frozenset(("one", "hundred", "thousand", "million"))
_NOT_PROSE = frozenset("sin cos tan cot sec csc log ln exp sqrt pi lim mod max min gcd lcm and or".split())


def final_answer(response: str) -> str | None:
    """Return the final answer as written, or None where the response states none."""
    conclusion = without_thinking(response)
    block = _last_answer_block(conclusion)
    if block is not None:
        boxed = _boxed_with_unit(block)
        return block.strip() if boxed is None else boxed
    boxed = _boxed_with_unit(conclusion)
    return _last_stated_value(conclusion[-MAX_TAIL_CHARS:].strip()) if boxed is None else boxed


def without_thinking(response: str) -> str:
    """Return what stands outside the think blocks; a block that was never opened or never closed is cut too.

    Of thinking that was never closed, what stands from the last complete answer block on is kept.
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


def format_score(response: str) -> float:
    """Return 1.0 for exactly one think block followed by exactly one answer block, else 0.0.

    White space may stand between the two blocks and around them, and nothing else.
    """
    if any(response.count(tag) != 1 for tag in _TAGS):
        return 0.0
    return 1.0 if _LAYOUT.fullmatch(response) else 0.0


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, or None.

    `\boxed{\frac{1}{2}} or \boxed{3}` → `3`
    """
    place = _last_box(text)
    return None if place is None else text[slice(*place)].strip()


def _boxed_with_unit(text: str) -> str | None:
    r"""The last box with the unit behind it: `\boxed{12} cm` → `12 cm`."""
    place = _last_box(text)
    if place is None:
        return None
    boxed = text[slice(*place)].strip()
    unit = unit_in_prose(text, place[1] + 1) if _is_plain(boxed) else ""
    return f"{boxed} {unit}" if unit else boxed


def _last_box(text: str) -> tuple[int, int] | None:
    """Where the content of the last complete box starts and ends."""
    end = len(text)
    for _ in range(MAX_BOXES):
        end = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        opening = _BOX.match(text, max(end, 0))
        closing = None if opening is None else _closing_brace(text, start=opening.end())
        if opening is not None and closing is not None:
            return opening.end(), closing
        if end <= 0:
            break
    return None


def is_prose(text: str) -> bool:
    """Return whether the text reads as words rather than as a value."""
    return len(_words(text)) >= 2 or "答案" in text


def sole_value(text: str) -> str | None:
    """Return the one value that a sentence states, or None where it states none or several.

    `The answer is 42.` → `42`; `It is 3 or 5.` → None, so that naming several values never pays.
    """
    clause = _last_answer_clause(text)
    if clause is not None and not is_prose(clause):
        return clause
    text = clause if clause is not None else text
    spans = {_span_content(match) for match in _MATH_SPAN.finditer(text)}
    if _BOUND.search(text) and not any(map(_BOUND.search, spans)):
        return None
    found = list(_MATH_SPAN.finditer(text)) or list(_NUMBER.finditer(text))
    values = spans or {match.group() for match in found}
    if not values:
        words = [word for word in _WORD.findall(text) if word.lower() not in _NO_NUMBERS and parse_number_words(word)]
        return words[0] if len(words) == 1 else None
    value = values.pop() if len(values) == 1 else None
    if value is None or _is_alternative(value, text):
        return None
    units = {unit_in_prose(text, match.end()) for match in found} - {""}
    if not units or not _is_plain(value):
        return value
    return f"{value} {units.pop()}" if len(units) == 1 else None


def listed_values(text: str) -> list[str]:
    """Return the formulas of a sentence, in order: `The solutions are $2$ and $3$.` → `2`, `3`."""
    return [_span_content(match) for match in _MATH_SPAN.finditer(text)]


def _is_plain(value: str) -> bool:
    """Whether it is a number or an expression of numbers, so that a unit may stand behind it."""
    return len(value) <= MAX_PLAIN_CHARS and _PLAIN_VALUE.fullmatch(value) is not None


def _is_alternative(value: str, text: str) -> bool:
    """Whether the sentence names something else instead: `either 42 or north`."""
    written = re.escape(value)
    return re.search(rf"\bor[\s$\\(*]+{written}|{written}[\s$\\)*,]+or\b", text) is not None


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(without_environments(text)) if word.lower() not in _NOT_PROSE]


def _last_answer_block(text: str) -> str | None:
    """The content of the last block that has any; a block that was never closed runs to the end."""
    start, end = text.rfind("<answer>"), text.rfind("</answer>")
    if start > end and not text[start + len("<answer>") :].strip() and end >= 0:
        start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") :].partition("</answer>")[0] if start >= 0 else None


def _closing_brace(text: str, *, start: int) -> int | None:
    depth = 1
    for index in range(start, min(start + MAX_BOX_CHARS, len(text))):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


def _last_answer_clause(text: str) -> str | None:
    clauses = _ANSWER_CLAUSE.findall(text)
    return _SENTENCE_END.split(clauses[-1], maxsplit=1)[0].strip(" *\t") if clauses else None


def _last_stated_value(text: str) -> str | None:
    clause = _last_answer_clause(text)
    if clause is not None:
        return clause
    last_line = text.rpartition("\n")[2].strip()
    if _OPTION_LINE.fullmatch(last_line):
        return last_line
    # "42", "B", "yes", "x = 5" are values as they stand; "so 42" and "12 apples" are not.
    if not is_prose(last_line) and not (_words(last_line) and re.search(r"\d|\$", last_line)):
        return last_line.rpartition("=")[2].strip() or None
    said = bold_end(last_line) or complement(last_line)
    if said is not None and not is_prose(said) and (re.search(r"\d|\$|^[A-J]$", said) or bold_end(last_line)):
        return said
    stated = [(match.end(), _span_content(match)) for match in _MATH_SPAN.finditer(text)]
    stated += [(match.end(), match.group()) for match in _NUMBER.finditer(text)]
    if not stated:
        return None
    end, value = max(stated)
    unit = unit_in_prose(text, end) if _is_plain(value) else ""
    return f"{value} {unit}" if unit else value


def _span_content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()
