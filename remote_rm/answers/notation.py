r"""The kinds of values, and notations with a meaning of their own: a date, a clock reading, a ratio, a code, ...

`COMPARED` says which kinds are compared. Two texts in one such notation are the same if their keys agree: `14:30` and
`2:30 PM`, `January 5, 2024` and `2024-01-05`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from math import gcd

from remote_rm.answers.lexer.values import YES_WORDS, Form
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.units import canonical_unit


class Kind(Enum):
    """What a value is; its text is how the README calls it."""

    NUMBER = "number"
    QUANTITY = "quantity"
    MONEY = "money"
    EXPRESSION = "expression"
    COMPUTATION = "computation"
    EQUATION = "equation"
    INTERVAL = "interval"
    SET = "set"
    TUPLE = "tuple"
    LIST = "list"
    MATRIX = "matrix"
    WORD = "word"
    CHOICE = "choice"
    YES_NO = "yes or no"
    NO_VALUE = "no value"
    DATE = "date"
    CLOCK = "clock"
    RANGE = "range"
    RATIO = "ratio"
    TELEPHONE = "telephone"
    CODE = "code"
    BASED = "base"
    RESIDUE = "residue"


SEQUENCES = frozenset({Kind.SET, Kind.TUPLE, Kind.LIST})

COMPARED: dict[Kind, frozenset[Kind]] = {
    # The unit or the currency may be missing.
    Kind.NUMBER: frozenset({Kind.QUANTITY, Kind.MONEY, Kind.EXPRESSION, Kind.RATIO, Kind.BASED, Kind.RESIDUE}),
    Kind.QUANTITY: frozenset({Kind.EXPRESSION}),
    Kind.MONEY: frozenset({Kind.EXPRESSION}),
    # `point A` is A; `x_1` is x1.
    Kind.EXPRESSION: frozenset({Kind.WORD, Kind.CODE}),
    # `2A3` is 2A3 in base 16.
    Kind.BASED: frozenset({Kind.CODE, Kind.EXPRESSION}),
    # `x > 3` may be written as an interval, and an interval of two numbers without its brackets.
    Kind.INTERVAL: frozenset({Kind.EXPRESSION, Kind.EQUATION, Kind.TUPLE}),
    # A vector may be written as a tuple, and with a factor in front.
    Kind.MATRIX: frozenset({Kind.EXPRESSION}) | SEQUENCES,
    # What is named or in brackets is compared by what it holds: `x = 5` is 5, `[5]` is 5.
    **dict.fromkeys((Kind.EQUATION, *SEQUENCES), frozenset(Kind) - {Kind.INTERVAL}),
}
"""With which other kinds each kind is compared; that holds in both directions."""

_PAIRS = frozenset({(one, other) for one, others in COMPARED.items() for other in others})


def are_compared(answer: Kind, gold: Kind) -> bool:
    """Return whether values of the two kinds can be the same."""
    return answer is gold or (answer, gold) in _PAIRS or (gold, answer) in _PAIRS


MAX_CHARS = 700
"""A longer text is in none of these notations."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A text in one of the notations, as what it means."""

    kind: Kind
    key: Hashable


@lru_cache(maxsize=4096)
def read_notation(text: str) -> Written | None:
    """Return what a normalised text in one of the notations means, or None for any other text."""
    if len(text) > MAX_CHARS or Form.PLAIN_DIGITS.fullmatch(text):
        return None
    for kind, reader in _READERS:
        if Form.HINTS[kind.name].search(text):
            key = reader(text)
            if key is not None:
                return Written(kind=kind, key=key)
    return None


def same_written(answer: Written, gold: Written) -> bool:
    """Return whether two of one kind are the same; of two readings of a clock, one may leave open which half of the day it is."""
    if answer.kind is not gold.kind:
        return False
    rule = _RULES.get(answer.kind)
    return answer.key == gold.key if rule is None else rule(answer.key, gold.key)


# Yes and no, and that there is nothing to state


def _yes_or_no(text: str) -> bool | None:
    """`Yes, it is.` is yes; `Yes or no` and `Yes, it is not` are neither."""
    match = Form.YES_NO.fullmatch(text)
    if match is None:
        return None
    is_yes = match[1].lower() in YES_WORDS
    return None if is_yes and Form.DENIAL.search(match[2] or "") else is_yes


def _phrase(text: str) -> int | None:
    """`There are no solutions.` is `No solution`."""
    return next((index for index, phrase in enumerate(Form.PHRASES) if phrase.fullmatch(text)), None)


# Dates and times of day

_MONTHS = "january february march april may june july august september october november december".split()
_NAMED_TIMES = {"noon": (0, "P"), "midday": (0, "P"), "midnight": (0, "A")}


def _date(text: str) -> tuple[int | None, int, int | None] | None:
    """Year, month and day; in `01/05/2024` the month is first, unless it cannot be one or full stops separate them."""
    for pattern in Form.DATES:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        parts = match.groupdict()
        month = _month(parts["month"]) if parts.get("month") else int(parts["m"])
        day = int(parts["day"]) if parts.get("day") else None
        if month is not None and day is not None and parts.get("mark") and (month > 12 or parts["mark"] == "."):
            month, day = day, month
        short = parts.get("short_year")
        year = int(parts["year"]) if parts.get("year") else 2000 + int(short) if short else None
        if month is not None and 1 <= month <= 12 and (day is None or 1 <= day <= 31):
            return year, month, day
    return None


def _month(name: str) -> int | None:
    name = name.lower()
    numbers = (
        index
        for index, month in enumerate(_MONTHS, start=1)
        if name in (month, month[:3]) or name == "sept" == month[:4]
    )
    return next(numbers, None)


def _clock(text: str) -> tuple[int, int, int, str] | None:
    """Hour, minute, second, and the half of the day, "24" if the hour determines it, "" if nothing does.

    With a colon alone it is a reading of a clock by its form: two digits up to 59 after an hour up to 24.
    """
    named = _NAMED_TIMES.get(text.lower().removeprefix("12 "))
    if named is not None:
        return (12, 0, 0, named[1])
    match = Form.CLOCK.fullmatch(text)
    if match is not None:
        part = (match["part"] or match["night"] or "").lower()
        half = (match["half"] or {"": "", "morning": "a"}.get(part, "p")).upper()
        if match["m"] is None and not half and not match["clock"]:
            return None
        hour, minute, second = (int(match[name] or 0) for name in "hms")
    else:
        match = Form.CHINESE_CLOCK.fullmatch(text)
        if match is None:
            return None
        half = "" if match["half"] is None else "A" if match["half"] in ("凌晨", "早上", "上午") else "P"
        hour, minute, second = int(match["h"]), 30 if match["thirty"] else int(match["m"] or 0), 0
    if hour > 24 or (half and hour == 0 and half == "P"):
        return None
    return hour, minute, second, half if 1 <= hour <= 12 else "24"


def _same_clock(answer: tuple[int, int, int, str], gold: tuple[int, int, int, str]) -> bool:
    if answer[1:3] != gold[1:3]:
        return False
    if answer[3] and gold[3]:
        return _hour_of_day(answer) == _hour_of_day(gold)
    return answer[0] == gold[0]


def _hour_of_day(clock: tuple[int, int, int, str]) -> int:
    return clock[0] % 24 if clock[3] == "24" else clock[0] % 12 + 12 * (clock[3] == "P")


# Pairs of numbers: ranges and scores, ratios

MAX_SPOKEN_RATIO = 12
"""`3 to 4` is a ratio, `10 to 20` a range: a ratio in words has no common factor and no larger term than this."""


def _range(text: str) -> tuple[Fraction, Fraction, str] | None:
    """Low end, high end, unit: `10-20`, `from 10 to 20`, `10%-20%`; so is a score `3-2`, whichever comes first."""
    match = Form.RANGE.fullmatch(text)
    if match is None or (match["joint"] == " and ") != (match["opened"] == "between "):
        return None
    if match["joint"] == "-" and (match["minus"] or match["high"].startswith("-")):
        return None
    if match["joint"] == " to " and not match["opened"] and _is_spoken_ratio(match["low"], match["high"]):
        return None
    units = [_unit(match[name] or "") for name in ("low_unit", "unit")]
    if None in units or (units[0] and units[0] != units[1]):
        return None
    low, high = (Fraction(match[name].replace(",", "")) for name in ("low", "high"))
    return low, high, units[1] or ""


def _same_range(answer: tuple[Fraction, Fraction, str], gold: tuple[Fraction, Fraction, str]) -> bool:
    return answer[:2] == gold[:2] and (answer[2] == gold[2] or not answer[2] or not gold[2])


def _unit(written: str) -> str | None:
    return written.strip() if written.strip() in ("", "%") else canonical_unit(written.strip())


def _is_spoken_ratio(low: str, high: str) -> bool:
    if not (low.isdigit() and high.isdigit()) or max(int(low), int(high)) > MAX_SPOKEN_RATIO:
        return False
    return gcd(int(low), int(high)) == 1


def _ratio(text: str) -> tuple[Fraction, ...] | None:
    """The terms over the first one: `6:8` and `3 to 4` are `3:4`; with a zero in front of or as a term, as written."""
    if not Form.RATIO.fullmatch(text):
        return None
    written = Form.RATIO_SIGN.split(text.replace(",", ""))
    if " to " in text and not (len(written) == 2 and _is_spoken_ratio(*written)):
        return None
    terms = [Fraction(term) for term in written]
    if not all(terms) or any(Form.LEADING_ZERO.match(term) for term in written):
        return (Fraction(0), *terms)
    return tuple(term / terms[0] for term in terms)


# Telephone numbers, codes, numbers with a base or a modulus

TELEPHONE_DIGITS = 7
_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()


def _telephone(text: str) -> tuple[str, ...] | None:
    """The digits of a telephone number however grouped; of shorter numbers with hyphens, the groups."""
    if Form.VERSION.fullmatch(text):
        return tuple(text.split("."))
    if not Form.TELEPHONE.fullmatch(text):
        return None
    digits = "".join(filter(str.isdecimal, text))
    return (digits,) if len(digits) >= TELEPHONE_DIGITS else tuple(Form.DIGITS.findall(text))


def _code(text: str) -> str | None:
    """A capital and digits right after a letter are no product: `A4`, `V8`; `H_2O` and `H2O` are the same."""
    if not Form.CODE.fullmatch(text) or Form.FUNCTION.search(text):
        return None
    if text.islower():
        return None
    if not Form.LETTER_BEFORE_DIGIT.search(text) and not (Form.FORMULA.fullmatch(text) and "_" in text):
        return None
    return code_of(text) if parse_quantity(text) is None else None


_SUBSCRIPT_MARKS = dict.fromkeys(map(ord, "_{} "))


def code_of(text: str) -> str:
    """The text without its subscripts' marks, and without its case if it has several letters."""
    bare = text.translate(_SUBSCRIPT_MARKS)
    return bare if sum(map(str.isalpha, bare)) == 1 else bare.casefold()


def _based(text: str) -> tuple[str, int | str] | None:
    match = Form.BASED.fullmatch(text)
    return None if match is None else (_digits(match[1]), _base(match[2]))


def _digits(written: str) -> str:
    return written.replace(",", "").upper()


def _base(written: str) -> int | str:
    return int(written) if written.isdigit() else _BASES.index(written) + 2 if written in _BASES else written


def _residue(text: str) -> tuple[int, int] | None:
    match = Form.RESIDUE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2] or match[3]))


def _same_residue(answer: tuple[int, int], gold: tuple[int, int]) -> bool:
    return answer[1] == gold[1] and (answer[0] == gold[0] or bool(gold[1] and (answer[0] - gold[0]) % gold[1] == 0))


_DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
_ABBREVIATED = {
    **{name[:3]: name for name in (*_MONTHS, *_DAYS)},
    **{"tues": "tuesday", "thur": "thursday", "thurs": "thursday", "sept": "september"},
}


def in_full(answer: str, *, gold: str) -> str:
    """Return a day's or month's name in full if the gold is a day or month: `Wed.` → `wednesday`."""
    return _ABBREVIATED.get(answer, answer) if gold in _MONTHS or gold in _DAYS else answer


_READERS: tuple[tuple[Kind, Callable[[str], Hashable | None]], ...] = (
    (Kind.YES_NO, _yes_or_no),
    (Kind.NO_VALUE, _phrase),
    (Kind.DATE, _date),
    (Kind.CLOCK, _clock),
    (Kind.RATIO, _ratio),
    (Kind.RANGE, _range),
    (Kind.TELEPHONE, _telephone),
    (Kind.BASED, _based),
    (Kind.RESIDUE, _residue),
    (Kind.CODE, _code),
)
_RULES: dict[Kind, Callable] = {Kind.CLOCK: _same_clock, Kind.RANGE: _same_range, Kind.RESIDUE: _same_residue}


# Where one side alone is in a notation


def is_choices(text: str) -> bool:
    """Return whether the text is several letters of options in order, such as `AC`."""
    return Form.CHOICES.fullmatch(text) is not None


def same_choices(answer: str, gold: str) -> bool | None:
    """`A and C` is `AC`; None if either is something else."""
    if not Form.CHOICES.fullmatch(gold) or not Form.LISTED_CHOICES.fullmatch(answer):
        return None
    return sorted(letter for letter in answer if letter in "ABCDEFGHIJ") == list(gold)


def same_without_base(based: Written, text: str, *, is_gold: bool) -> bool:
    """A gold's base may be left out, 2516 is `2516_8`; a base that the gold does not have must be ten."""
    assert isinstance(based.key, tuple)
    digits, base = based.key
    return (is_gold or base == 10) and Form.BARE_DIGITS.fullmatch(text) is not None and digits == _digits(text)


def same_without_modulus(residue: Written, text: str) -> bool:
    """Without its modulus an answer must be the residue itself: 10 is not `3 (mod 7)`, but `10 (mod 7)` is."""
    assert isinstance(residue.key, tuple)
    return Form.INTEGER.fullmatch(text) is not None and int(text) == residue.key[0]


def same_as_quotient(ratio: Written, text: str) -> bool:
    """`3:4` is 3/4; a ratio of three terms is no number."""
    number, terms = parse_quantity(text), ratio.key
    assert isinstance(terms, tuple)
    return (
        number is not None and not number.unit and len(terms) == 2 and terms[0] == 1 and number.value * terms[1] == 1
    )
