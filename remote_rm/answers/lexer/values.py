r"""The types of spans that are values: units, numbers, and notations such as dates, clock readings and ratios.

Units and their names are tables, of which the patterns are made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from remote_rm.answers.lexer import Patterns, patterns, sections

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
    return (
        names | {spelling: unit for unit, (spellings, *_) in others.items() for spelling in spellings.split()},
        sizes,
    )


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
Unit, Number, Form = (Patterns(_FORMS[section]) for section in ("units", "numbers", "notations"))
HINTS, PHRASES, DATES = (_FORMS[section] for section in ("hints", "phrases", "dates"))
"""HINTS: what a text in a notation has in it, by the name of its kind: the readers of that kind are tried only then."""
