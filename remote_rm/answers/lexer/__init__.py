r"""The lexer: all regular expressions of answers/, by the types of the spans that they find; the .ini files here hold them.

`Token` finds words that state, deny, bound and leave open, and options (`english.ini`), `Latex` the parts of formulas,
`Unit`, `Number` and `Form` values. A new wording is an addition to a table.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from configparser import RawConfigParser
from fractions import Fraction
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

    def __init__(self, **compiled: re.Pattern[str]):
        self.__dict__.update(compiled)

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
Token = Patterns(**_ENGLISH["any case"], **_ENGLISH["as written"])
"""The words of sentences, English and Chinese."""
Latex = Patterns(**patterns("formulas.ini")["as written"])
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


_TABLES = sections("values.ini")
WORDS = {name: tuple(words.split()) for name, words in _TABLES["words"].items()}
_MICRO = ("μ", "µ", r"\mu ")


def _units() -> tuple[dict[str, str], dict[str, tuple[str, int, Fraction]]]:
    names = {name: name for name in WORDS["named_by_themselves"]}
    sizes: dict[str, tuple[str, int, Fraction]] = {}
    others = {unit: row.split("|") for unit, row in _TABLES["others"].items()}
    for unit, (_, *size) in others.items():
        if size:
            number, base, power = (*size[0].replace("^", " ").split(), "1")[:3]
            sizes[unit] = (base, int(power), Fraction(number))
    for unit, row in _TABLES["prefixed"].items():
        words, chinese, prefixes = (part.split() for part in row.split("|"))
        base, dimension, one = sizes.setdefault(unit, (unit, 1, Fraction(1)))
        for prefix in ("", *prefixes):
            word, exponent, character = _TABLES["prefixes"][prefix].split() if prefix else ("", "0", "")
            in_words = [word + name + end for name in words for end in ("", "s"[: name[-1] != "z"])]
            in_words += [name.capitalize() for name in in_words if len(name) > 4]
            in_chinese = [character + name for name in chinese]
            symbols = [mark + unit for mark in (_MICRO if prefix == "μ" else (prefix,))]
            names |= dict.fromkeys((*symbols, *in_words, *in_chinese), prefix + unit)
            sizes[prefix + unit] = (base, dimension, one * Fraction(10) ** int(exponent))
    return names | {word: unit for unit, (spellings, *_) in others.items() for word in spellings.split()}, sizes


NAMES, SIZES = _units()
"""NAMES: a unit's canonical spelling by every spelling; SIZES: by canonical spelling its base unit, its power, its size."""
CURRENCIES = frozenset(WORDS["currencies"])


def pattern_of(names: Iterable[str]) -> str:
    """Return a regular expression for any of the names, the longest first; it branches by character, which is quick."""
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(name[:1], []).append(name[1:])
    branches = [re.escape(first) + pattern_of(rest) for first, rest in tails.items() if first]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in tails else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in tails else joined


WORD_VALUES = {word: value for value, word in enumerate(WORDS["small_numbers"])} | {
    word: 10 * value for value, word in enumerate(WORDS["tens"], start=2)
}
WORD_SCALES = {word: int(size) for word, size in _TABLES["scales of numbers in words"].items()}
PART_WORDS = {word: Fraction(1, int(parts)) for parts, words in _TABLES["parts"].items() for word in words.split()}
"""What one of them is of a whole: `quarters` → 1/4."""
SCALES: dict[str, int | Fraction] = {
    **WORD_SCALES,
    **{word: int(size) for word, size in _TABLES["other scales"].items()},
    **PART_WORDS,
}
NUMBER_WORDS = frozenset((*WORD_VALUES, *filter(str.isascii, SCALES)))
CHINESE_DIGITS = "零一二三四五六七八九"


def _longest_first(words: Iterable[str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


_FORMS = patterns(
    "notations.ini",
    NAME=pattern_of(NAMES),
    PART=_longest_first(PART_WORDS),
    CHINESE_SCALE=_longest_first(word for word in SCALES if not word.isascii()),
    CHINESE_DIGITS=CHINESE_DIGITS,
    POLAR_WORDS=_longest_first((*WORDS["yes"], *WORDS["no"])),
    CLASSIFIERS=WORDS["classifiers"][0],
    BARE_CLASSIFIERS=WORDS["bare_classifiers"][0],
)
Unit, Number, Form = (Patterns(**_FORMS[section]) for section in ("units", "numbers", "notations"))
HINTS, PHRASES, DATES = (_FORMS[section] for section in ("hints", "phrases", "dates"))
"""HINTS: what a text in a notation has in it, by the name of its kind: the readers of that kind are tried only then."""


_SECTIONS = sections("languages.ini")
LANGUAGES = tuple(language for name, language in _SECTIONS.items() if name != "Others")


def _words() -> dict[str, str]:
    """What an answer of one word is in English; a word of two meanings is none."""
    meanings: dict[str, set[str]] = {}
    for language in LANGUAGES:
        written = {str(number): forms.split("/") for number, forms in enumerate(language["numbers"].split())}
        for english, forms in (*written.items(), *((name, language[name].split("|")) for name in ("yes", "no"))):
            for form in forms:
                meanings.setdefault(form.casefold(), set()).add(english)
    return {word: english.pop() for word, english in meanings.items() if len(english) == 1}


# English has these words, too.
_ALSO_ENGLISH = frozenset("once six null une ein eine um _".split())
FOREIGN_WORDS = {word: english for word, english in _words().items() if word not in _ALSO_ENGLISH} | {"không": "no"}
WHOLE_WORD = "sept"
"""The abbreviation of a month if it has a capital or a full stop."""


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns if pattern), re.IGNORECASE)


def _introduction(language: Mapping[str, str]) -> re.Pattern[str]:
    """What introduces an answer, with its verb; in a language with the verb at the end, it may be missing here."""
    joined, often = (f"|{language['verb']}", "*") if "ending" in language else ("", "+")
    verb = rf"(?:\s*(?:(?:{language['verb']})(?![^\W\d_]){joined}|[:：=]))"
    return _any_of((f"(?:{language['answer']}){verb}{often}", language.get("with_verb", "")))


DENIED, MAYBE, ANSWER = (
    _any_of(language.get(key, "").replace("\n", "") for language in _SECTIONS.values())
    for key in ("denied", "maybe", "answer")
)
INTRODUCED = tuple(map(_introduction, LANGUAGES))
"""What introduces an answer in each of LANGUAGES, with its verb."""

STATED = tuple(re.compile(rf"(?:^|\s)(?:{language.get('states', '(?!)')})\s", re.IGNORECASE) for language in LANGUAGES)
"""The verb of a plain sentence in each of LANGUAGES."""

_ARTICLE = r"^(?:eine?n?|de[rns]|das|die|une?|les?|la|l['’]|el|los|las|una|uma?) (?=\w)"


def bare_answer(said: str, language: Mapping[str, str]) -> str:
    """Return an answer without its article, the verb after it and the noun before its letter; `or` joins alternatives."""
    if "ending" in language:
        said = re.sub(rf"\s*(?:{language['ending']})(?=\W*$)", "", said)
    if "option" in language:
        said = re.sub(rf"^(?:{language['option']})\s+(?=\(?[A-J]\b)", "", said, flags=re.IGNORECASE)
    said = re.sub(_ARTICLE, "", said, flags=re.IGNORECASE)
    return re.sub(language["either"], " or ", said, flags=re.IGNORECASE)
