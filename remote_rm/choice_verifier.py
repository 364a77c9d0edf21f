r"""Judges multiple-choice answers by their letter: `B`, `(b)`, `B. 12 cm`, `\boxed{B}`, `option B`.

python -m remote_rm.choice_verifier --port 5000
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import ClassVar

from remote_rm import verifier_command
from remote_rm.answer_verifier import AnswerVerifier
from remote_rm.answers.normalization import normalize
from remote_rm.reward_function import reward_func_of

MAX_CHARS = 1000
"""A longer answer names no choice, and a longer label is ungradable."""

_NAMED = r"(?:option|choice|answer)\s*"
_LEAD_IN = re.compile(
    r"\b(?:answer|option|choice)\b[\s*_]*(?:\b(?:is|would be|must be)\b|:|=)[\s*_:]*|\bI (?:choose|pick|select)\s+",
    re.IGNORECASE,
)
_LETTER = re.compile(
    rf"(?P<named>{_NAMED})?(?:\(\s*(?P<round>[A-J])\s*\)|\[\s*(?P<square>[A-J])\s*\]|(?P<bare>[A-J])(?![^\W_]|['’]))",
    re.IGNORECASE,
)
_MARK = re.compile(r"\s*[.):,;：、-]\s*|\s+(?=\d)")
_VERDICT = re.compile(r"\s+is\s+(?:the\s+)?(?:correct|right|best|answer|true)\b|\s+(?:because|since|as|for)\b")
_JOINED = r"(?:\b(?:or|and|nor|versus|vs)\b|[,;/&|+])"
_OTHER_JOINED = re.compile(rf"\s*{_JOINED}\s*(?:{_NAMED})?\(?[A-J](?![^\W_])", re.IGNORECASE)
_OTHER_AT_ONCE = re.compile(rf"[\s.:()\[\]-]*(?:{_NAMED})?[(\[]?(?P<letter>[A-J])(?:[^\w\s]|\s*$)")
_OTHER_LATER = re.compile(
    rf"(?<![^\W_])(?:\((?P<round>[A-J])\)|(?P<marked>[A-J])[.):]\s?(?=\S))"
    rf"|{_JOINED}\s*(?:(?:maybe|possibly|either)\s+)?(?:{_NAMED})?(?P<last>[A-J])\s*$"
)
_LETTERS_ONLY = re.compile(r"(?:[\W_]|\b(?:or|and|[a-j])\b)*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A letter and the text of the option, which is "" where none is written."""

    letter: str
    text: str


def read_choice(text: str) -> Choice | None:
    """Return the choice that an answer names, or None where it names none or several."""
    text = _clean(text)
    led_in = [
        (match.end(), letter) for match in _LEAD_IN.finditer(text) if (letter := _LETTER.match(text, match.end()))
    ]
    if len({_letter_of(letter) for _, letter in led_in}) > 1:
        return None
    match = led_in[0][1] if led_in else _LETTER.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    others = {other[other.lastgroup or 0] for other in _OTHER_LATER.finditer(rest)}
    if _OTHER_JOINED.match(rest) or _OTHER_AT_ONCE.match(rest) or others - {_letter_of(match)}:
        return None
    return _choice(match, rest=rest, is_led_in=bool(led_in))


def read_label(text: str) -> Choice | None:
    """Return the choice that a label is, or None: unlike an answer, its text may hold whatever letters it likes."""
    text = _clean(text)
    match = _LETTER.match(text)
    if match is None or _OTHER_JOINED.match(text[match.end() :]):
        return None
    return _choice(match, rest=text[match.end() :], is_led_in=False)


def matches(answer: str, label: str) -> bool:
    """Return whether the answer names the label's letter, or states the label or its option's text word for word."""
    gold = read_label(label)
    if gold is None or len(answer) > MAX_CHARS:
        return False
    stated = _clean(answer).casefold()
    if stated == _clean(label).casefold() or (stated == gold.text.casefold() and not _LETTERS_ONLY.fullmatch(stated)):
        return True
    choice = read_choice(answer)
    return choice is not None and choice.letter == gold.letter


def _clean(text: str) -> str:
    return normalize(unicodedata.normalize("NFKC", text)) if len(text) <= MAX_CHARS else ""


def _letter_of(match: re.Match[str]) -> str:
    return (match["round"] or match["square"] or match["bare"]).upper()


def _choice(match: re.Match[str], *, rest: str, is_led_in: bool) -> Choice | None:
    """The choice, or None where the letter is only a word: `A dog`, `I think so`."""
    letter = _letter_of(match)
    if not rest:
        return Choice(letter=letter, text="")
    if mark := _MARK.match(rest):
        return Choice(letter=letter, text=rest[mark.end() :])
    if match["bare"] is None:
        return Choice(letter=letter, text=rest.strip())
    said = _VERDICT.match(rest) and (is_led_in or match["named"] or " is " in rest)
    return Choice(letter=letter, text="") if said else None


@dataclass(frozen=True, kw_only=True)
class ChoiceVerifier(AnswerVerifier):
    """The letter of a multiple-choice answer; a label without a letter from A to J is ungradable."""

    name: ClassVar[str] = "choice"
    reports_ungradable: ClassVar[bool] = True

    def matches(self, answer: str, label: str) -> bool:
        """Return whether the answer names the label's letter."""
        return matches(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label names one letter from A to J."""
        return read_label(label) is not None


VERIFIER = ChoiceVerifier
reward_func = reward_func_of("choice")

if __name__ == "__main__":
    verifier_command.run("choice", None, prog="python -m remote_rm.choice_verifier")
