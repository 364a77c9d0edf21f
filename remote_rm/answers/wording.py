"""Rewords an answer so that the rules read it: in English, without layout, crossed-out parts and goodbyes."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

from remote_rm.answers.lexer import (
    ANSWER,
    DENIED,
    FOREIGN_WORDS,
    INTRODUCED,
    LANGUAGES,
    MAYBE,
    STATED,
    WHOLE_WORD,
    Pattern,
    Token,
    bare_answer,
    respelled,
)

MAX_CHARS = 600
MAX_WORD_CHARS = 40

_POLAR = ("yes", "no")
_AROUND = " \t\n*_\"'.。।!！¡¿،"


def word_in_english(text: str) -> str:
    """Return an answer of one word in English, and the digits of any other as 0 to 9."""
    if not text.isascii():
        text = Token.FOREIGN_DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), text)
    word = text.strip(_AROUND)
    is_abbreviation = word.casefold() == WHOLE_WORD and "." in text
    english = FOREIGN_WORDS.get(word.casefold(), text)
    is_name = (word.casefold() == WHOLE_WORD or len(word) == 2 and english not in _POLAR) and text != text.lower()
    return text if is_abbreviation or is_name or len(word) > MAX_WORD_CHARS else english


@lru_cache(maxsize=4096)
def in_english(text: str) -> str:
    """Return the text with its last sentence about the answer in English; most texts as they are."""
    text = Token.DECIMAL_COMMA_MEASURED.sub(r"\1.\2", word_in_english(Token.FOREIGN_CONTRAST.sub("", text)))
    head, comma, rest = text.partition(",")
    if comma and (polar := FOREIGN_WORDS.get(word := head.strip(_AROUND).casefold(), word)) in _POLAR:
        text = polar if Token.FOREIGN_REASON.match(rest) else f"{polar},{rest}"
    sentences = [sentence for sentence in Token.FOREIGN_SENTENCE_END.split(text[-MAX_CHARS:]) if sentence]
    is_about = [ANSWER.search(sentence) is not None for sentence in sentences]
    first = max((place for place, about in enumerate(is_about) if about), default=len(sentences) - 1)
    last = " ".join(sentences[first:])
    if DENIED.search(last):
        return head if comma and polar == "no" and len(sentences) == 1 else f"not {last}"
    if MAYBE.search(last):
        return f"maybe {last}"
    if any(is_about):
        return _introduced(last, INTRODUCED) or text
    return text if Token.VERB.search(last) else _introduced(last, STATED, is_plain=True) or text


def _introduced(text: str, by: Sequence[Pattern], *, is_plain: bool = False) -> str:
    """The text from its last introduction of an answer on, in English; "" if it has none.

    If it `is_plain`, it has one verb, and no number before it.
    """
    found = [(one.end(), -one.start(), place) for place, pattern in enumerate(by) for one in pattern.finditer(text)]
    is_more = len({end for end, *_ in found}) > 1 or Token.NOT_PLAIN.search(text)
    if not found or (is_plain and is_more):
        return ""
    end, _, place = max(found)
    said = bare_answer(text[end:].strip(), LANGUAGES[place])
    if "decimal_comma" not in LANGUAGES[place]:
        said = Token.DECIMAL_COMMA.sub(r"\1.\2", said)
    is_late = is_plain and Token.DIGIT_OR_DOLLAR.search(said) and not Token.VALUE_FIRST.match(said)
    return "" if is_late or not said.strip(_AROUND) else f"The answer is {word_in_english(said.rstrip('।'))}"


MAX_SIGN_OFF_CHARS = 300
_GOODBYES = (
    "hope", "me know", "anything else", "free to", "hesitate", "if you", "do you", "would you", "to help", "thank", "have a ",
    "welcome", "good luck", "happy ", "希望", "如果", "check", "comprob", "probe", "rif", "验",
)  # fmt: skip
MIN_OPTIONS = 3
MAX_OPTION_CHARS = 60
ALPHABET = "ABCDEFGHIJ"
"""Letters of options."""
_KEYS = ("answer", "final_answer", "result", "solution", "choice", "option")


@lru_cache(maxsize=4096)
def plain(answer: str) -> str:
    """Return the answer as the rules read it; most answers as they are."""
    for step in STEPS:
        answer = step(answer)
    return answer


def without_sign_off(text: str) -> str:
    """Return the text without the goodbyes at its end: `I hope this helps! Let me know if …`."""
    while True:
        start = max(0, len(text) - MAX_SIGN_OFF_CHARS)
        end = text[start:].lower()
        found = Token.SIGN_OFF.search(text, start) if any(word in end for word in _GOODBYES) else None
        if found is None or not text[: found.start()].strip():
            return text
        text = text[: found.start()].rstrip()


def without_struck_out(text: str) -> str:
    return Token.STRUCK_OUT.sub(" ", text).strip() if "~~" in text or "<" in text or "\\" in text else text


def is_copied(text: str) -> bool:
    """Return whether the text ends in the options of a question: `A. 5 B. 6 C. 7`, or a question with a list."""
    if Token.ASKED_LIST.search(text):
        return True
    text = Token.INSTRUCTION.sub("", text)
    marks = list(Token.OPTION_MARKED.finditer(text))[-MIN_OPTIONS:]
    letters = "".join(mark[mark.lastgroup or 0] for mark in marks)
    if len(letters) < MIN_OPTIONS or letters not in ALPHABET:
        return False
    rest = text[marks[-1].end() :].strip()
    return len(rest) <= MAX_OPTION_CHARS and "\n" not in rest and not Token.VERB.search(rest)


def from_code(text: str) -> str:
    """Return the content of a block of code, and the answer that an object of JSON or Python holds."""
    fenced = Token.FENCE.fullmatch(text) if "```" in text else None
    inside = (fenced[1] if fenced else text).strip()
    if not inside.startswith("{") or not inside.endswith("}"):
        return inside if fenced else text
    try:
        found = json.loads(inside if '"' in inside else inside.replace("'", '"'))
    except (ValueError, RecursionError):
        return text
    found = {key.lower().replace(" ", "_"): value for key, value in found.items()} if isinstance(found, dict) else {}
    value = next((found[key] for key in _KEYS if key in found), None)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (str, int, float, list)) else text


def in_formulas(text: str) -> str:
    """Return the formula that a text in words says: `x is greater than 3` → `x > 3`; any other text as it is."""
    bare = text.replace("$", "")
    formula = respelled(bare, "in words") if Token.IN_WORDS.search(text) else bare
    return text if formula == bare else formula


def without_layout(text: str) -> str:
    """Return a text without its heading and title, and a text of one line without a list's or a conclusion's mark."""
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
    without_struck_out,
    without_sign_off,
    from_code,
    without_layout,
    _without_remarks,
    in_english,
    _from_chinese,
    in_formulas,
)
"""What is done to an answer, in this order."""
