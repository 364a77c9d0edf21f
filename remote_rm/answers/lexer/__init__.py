r"""The lexer: all regular expressions of answers/, by the types of the spans that they find; the .ini files here hold them.

`Token` finds words that state, deny, bound and leave open, and options (`english.ini`), `Latex` the parts of formulas.
`values` is for numbers and units, `languages` for ten other languages. A new wording is an addition to a table.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from configparser import RawConfigParser
from functools import lru_cache
from pathlib import Path


def sections(file: str, *, delimiter: str = "=") -> dict[str, dict[str, str]]:
    """Return the sections of a table of this folder, whose lines are a key and a value with a delimiter between them."""
    table = RawConfigParser(delimiters=(delimiter,), comment_prefixes=("#",))
    table.optionxform = str  # type: ignore[assignment, method-assign]
    table.read_string((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {name: dict(table[name]) for name in table.sections()}


Match = re.Match[str]
Pattern = re.Pattern[str]


class Patterns:
    """Compiled patterns by name."""

    def __init__(self, patterns: Mapping[str, re.Pattern[str]]):
        self.__dict__.update(patterns)

    def __getattr__(self, name: str) -> re.Pattern[str]:
        raise AttributeError(f"no table of answers/lexer has the pattern {name}")


def patterns(file: str, **parts: str) -> dict[str, dict[str, re.Pattern[str]]]:
    """Return the patterns of a table by section and name; «NAME» stands for a given part, or for an entry above."""
    found: dict[str, dict[str, re.Pattern[str]]] = {}
    for section, entries in sections(file).items():
        flags = re.IGNORECASE if section == "any case" else 0
        for name, lines in entries.items():
            parts[name] = _PART.sub(lambda part: parts[part[1]], lines.replace("\n", ""))
            if section != "parts":
                found.setdefault(section, {})[name] = re.compile(parts[name], flags)
    return found


_PART = re.compile("«([A-Z_]+)»")
_ENGLISH = patterns("english.ini")
Token = Patterns(_ENGLISH["any case"] | _ENGLISH["as written"])
"""The words of sentences, English and Chinese."""
Latex = Patterns(patterns("formulas.ini")["as written"])
"""Parts of formulas."""
_SPELLINGS = {
    name: [(re.compile(pattern), spelling.replace("␣", " ")) for pattern, spelling in rows.items()]
    for name, rows in sections("spellings.ini", delimiter="→").items()
}


def respelled(text: str, section: str) -> str:
    """Return the text with the spellings of a section of spellings.ini replaced, one after the other."""
    for pattern, spelling in _SPELLINGS[section]:
        text = pattern.sub(spelling, text)
    return text


POLAR = {"yes": True, "true": True, "no": False, "false": False, "是": True, "对": True, "否": False, "错": False}
SIDES = frozenset(
    "left right up down top bottom above below north south east west 左 右 上 下 左边 右边 上面 下面".split()
)
NOT_PROSE = frozenset("sin cos tan cot sec csc log ln exp sqrt pi lim mod max min gcd lcm and or".split())
NO_NUMBERS = frozenset(("one", "hundred", "thousand", "million"))
NO_UNIT_IN_PROSE = frozenset(("in", "a", "A", "at"))
_FULL_WIDTH = {0xFEE0 + ord(sign): sign for sign in string.digits + string.ascii_letters}
_INTRODUCING = (
    "answer", "option", "choice", "choose", "chose", "pick", "select", "go with", " be", "####", "答", "选", "【",
    "corresponds", "matches", "correct ", "right ", "true ", "应该", "leaves", "we get", "we choose", "it is", "it's",
    "it’s", "this is", "that is", "that's", "that’s", "this's",
)  # fmt: skip


@lru_cache(maxsize=4096)
def introductions(text: str) -> tuple[re.Match[str], ...]:
    """Return the places at which the text introduces an answer, in order."""
    lowered = text.lower()
    return tuple(Token.LEAD_IN.finditer(text)) if any(words in lowered for words in _INTRODUCING) else ()


def span_content(match: re.Match[str]) -> str:
    """Return the formula of a match of `Token.FORMULA`."""
    return next(group for group in match.groups() if group is not None).strip()


def places_of(number: str, text: str) -> list[int]:
    """Return the ends of a number's places in a text; `5` is not in `15` or `5.2`."""
    return [match.end() for match in re.finditer(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text)]


def with_half_width(text: str) -> str:
    """Return the text with the full-width letters and digits of Chinese keyboards as ASCII."""
    return text.translate(_FULL_WIDTH)
