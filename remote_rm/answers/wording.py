r"""Rewords an answer so that the rules read it: without layout, crossed-out parts and goodbyes, and in English.

`## Answer\n**24**` → `24`; `~~5~~ 6` → `6`; `{"answer": 24}` → `24`; `8, because 3+5=8` → `8`; `El resultado es 8.` →
`The answer is 8.`. What crosses out all it says is left empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

from remote_rm.answers.languages import in_english
from remote_rm.answers.lexer import Token

_KEYS = ("answer", "final_answer", "Answer")


@lru_cache(maxsize=4096)
def plain(answer: str) -> str:
    """Return the answer as the rules read it; most answers as they are."""
    for step in STEPS:
        answer = step(answer)
    return answer


def without_sign_off(text: str) -> str:
    """Return the text without the goodbyes at its end: `I hope this helps! Let me know if …`."""
    while (shorter := Token.SIGN_OFF.sub("", text, count=1)) != text and shorter.strip():
        text = shorter.rstrip()
    return text


def _without_struck_out(text: str) -> str:
    return Token.STRUCK_OUT.sub(" ", text).strip() if "~~" in text or "<" in text or "\\" in text else text


def _from_code(text: str) -> str:
    """The content of a block of code, and the answer that a JSON object holds."""
    fenced = Token.FENCE.fullmatch(text) if "```" in text else None
    inside = (fenced[1] if fenced else text).strip()
    if not inside.startswith("{") or not inside.endswith("}"):
        return inside if fenced else text
    try:
        found = json.loads(inside)
    except (ValueError, RecursionError):
        return text
    value = next((found[key] for key in _KEYS if key in found), None) if isinstance(found, dict) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (str, int, float)) else text


def _without_layout(text: str) -> str:
    heading = Token.HEADING.match(text)
    text = text[heading.end() :] if heading and text[heading.end() :].strip() else text
    if "\n" not in text.strip():
        mark = Token.LINE_MARK.match(text)
        text = text[mark.end() :] if mark else text
    return Token.TITLE.sub("", text)


def _without_remarks(text: str) -> str:
    """Without the reason after the answer, and without brackets around its unit."""
    reason = Token.REASON.match(text)
    if reason and not Token.DENIED.search(text) and not Token.LEFT_OPEN.search(text):
        return reason[1]
    remark = Token.UNIT_REMARK.match(text)
    if remark and remark[1].strip()[-1:].isdigit() and remark[2].strip() in ("units", "unit"):
        return f"{remark[1].strip()} {remark[2]}"
    return text


def _from_chinese(text: str) -> str:
    """Without what introduces a value in Chinese; the letter of `C选项`."""
    if text.isascii():
        return text
    option = Token.CHINESE_OPTION.match(text)
    return (option[1] or option[2]) if option else Token.CHINESE_LEAD.sub("", text)


STEPS: tuple[Callable[[str], str], ...] = (
    _without_struck_out,
    without_sign_off,
    _from_code,
    _without_layout,
    _without_remarks,
    _from_chinese,
    in_english,
)
"""What is done to an answer, in this order."""
