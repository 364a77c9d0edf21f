r"""The kinds of values, and notations with a meaning of their own: a date, a clock reading, a ratio, a code, ...

`PRECEDENCE` is the order in which a text is read as each kind, and `COMPARED` says which kinds are compared. Two texts in
one notation are the same if their keys agree: `14:30` and `2:30 PM`, `January 5, 2024` and `2024-01-05`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from remote_rm.answers.lexer import CURRENCIES, DATES, HINTS, PHRASES, WORDS, Form, Latex
from remote_rm.answers.quantity import Quantity, canonical_unit, parse_quantity, split_unit
from remote_rm.answers.reading import (
    Region,
    enclosing_delimiters,
    inside_of,
    is_plain_pair,
    parse_matrix,
    parse_region,
    split_top_level,
    without_environments,
    without_membership,
)


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
_PAIRS = frozenset(
    {pair for one, others in COMPARED.items() for other in others for pair in ((one, other), (other, one))}
)
Reader = Callable[[str], object]
MAX_CHARS = 700
"""A longer text is not parsed as any notation."""


def are_compared(answer: Kind, gold: Kind) -> bool:
    """Return whether values of the two kinds can be the same."""
    return answer is gold or (answer, gold) in _PAIRS


class Written(NamedTuple):
    """A text as what it means."""

    kind: Kind
    key: Any
    """What its reader has found."""


@lru_cache(maxsize=4096)
def kind_of(text: str) -> Kind:
    """Return the kind of value that a normalised text is."""
    return next(_readings(text, PRECEDENCE)).kind


@lru_cache(maxsize=4096)
def read_notation(text: str) -> Written | None:
    """Return what a normalised text in one of the notations means, or None for any other text."""
    return next(_readings(text, _NOTATIONS), None)


def _readings(text: str, rows: Iterable[tuple[Kind, Reader]]) -> Iterator[Written]:
    """What the text is by each of the readers, of which one of a notation is only asked if the text has its hint."""
    may_be_notation = len(text) <= MAX_CHARS and not Form.PLAIN_DIGITS.fullmatch(text)
    for kind, reader in rows:
        hint = HINTS.get(kind.name)
        if hint is None or (may_be_notation and hint.search(text)):
            key = reader(text)
            if key is not None:
                yield Written(kind, key)


def same_written(answer: Written, gold: Written) -> bool:
    """Return whether two values are the same; of two readings of a clock, one may leave open which half of the day it is."""
    one, other = answer.key, gold.key
    if answer.kind is not gold.kind:
        return False
    if gold.kind is Kind.CLOCK:
        hour = "hour of day" if one["hour of day"] is not None and other["hour of day"] is not None else "hour"
        return all(one[part] == other[part] for part in ("minute", "second", hour))
    if gold.kind is Kind.RANGE:
        return one[:2] == other[:2] and (one[2] == other[2] or not one[2] or not other[2])
    if gold.kind is Kind.RESIDUE:
        return one == other or bool(one[1] == other[1] != 0 and (one[0] - other[0]) % other[1] == 0)
    return one == other


def same_as_plain(written: Written, text: str, *, is_gold: bool) -> bool:
    """Return whether a value in a notation is the same as a text in none.

    A gold's base may be left out, 2516 is `2516_8`; a base that the gold does not have must be ten. Without its modulus an
    answer must be the residue itself: 10 is not `3 (mod 7)`, but `10 (mod 7)` is. `3:4` is 3/4.
    """
    if written.kind is Kind.BASED:
        digits, base = written.key
        is_digits = Form.BARE_DIGITS.fullmatch(text) is not None
        return (is_gold or base == 10) and is_digits and digits == _digits(text)
    if written.kind is Kind.RESIDUE:
        return Form.INTEGER.fullmatch(text) is not None and int(text) == written.key[0]
    if written.kind is Kind.RATIO:
        number = parse_quantity(text)
        is_quotient = number is not None and not number.unit and len(written.key) == 2 and written.key[0] == 1
        return is_quotient and number is not None and number.value * written.key[1] == 1
    return written.kind is Kind.CODE and written.key == _bare_code(text)


def same_choices(one: str, other: str) -> bool | None:
    """`A and C` is `AC`; None if it is something else."""
    for listed, letters in ((one, other), (other, one)):
        if Form.CHOICES.fullmatch(letters) and Form.LISTED_CHOICES.fullmatch(listed):
            return sorted(filter("ABCDEFGHIJ".__contains__, listed)) == list(letters)
    return None


# Yes and no, and that there is nothing to state


def _yes_or_no(text: str) -> bool | None:
    """`Yes, it is.` is yes; `Yes or no` and `Yes, it is not` are neither."""
    match = Form.YES_NO.fullmatch(text)
    if match is None:
        return None
    is_yes = match[1].lower() in WORDS["yes"]
    return None if is_yes and Form.DENIAL.search(match[2] or "") else is_yes


def _phrase(text: str) -> int | None:
    """`There are no solutions.` is `No solution`."""
    return next((index for index, phrase in enumerate(PHRASES.values()) if phrase.fullmatch(text)), None)


# Dates and times of day

_MONTH_NUMBERS = {form: number for number, name in enumerate(WORDS["months"], 1) for form in (name, name[:3])} | {
    "sept": 9
}
_ABBREVIATED = {name[:3]: name for name in (*WORDS["months"], *WORDS["days"])} | {
    "tues": "tuesday", "thur": "thursday", "thurs": "thursday", "sept": "september",
}  # fmt: skip
_PARTS_OF_HOUR = {"": Quantity(Fraction(0)), "half": Quantity(Fraction(30))} | dict.fromkeys(
    ("quarter", "a quarter"), Quantity(Fraction(15))
)
_NAMED_HOURS = {"noon": 12, "midday": 12, "midnight": 0}


def in_full(answer: str, *, gold: str) -> str:
    """Return a day's or month's name in full if the gold is a day or month: `Wed.` → `wednesday`."""
    return _ABBREVIATED.get(answer, answer) if gold in WORDS["months"] or gold in WORDS["days"] else answer


def _date(text: str) -> tuple[int | None, int, int | None] | None:
    """Year, month and day; in `01/05/2024` the month is first, unless it cannot be one or full stops separate them."""
    for match in filter(None, (pattern.fullmatch(text) for pattern in DATES.values())):
        parts = match.groupdict()
        month = _MONTH_NUMBERS.get(parts["month"].lower(), 0) if parts.get("month") else int(parts["m"])
        day = int(parts["day"]) if parts.get("day") else None
        if day is not None and parts.get("mark") and (month > 12 or parts["mark"] == "."):
            month, day = day, month
        year = parts.get("year") or (f"20{parts['short_year']}" if parts.get("short_year") else None)
        if 1 <= month <= 12 and (day is None or 1 <= day <= 31):
            return int(year) if year else None, month, day
    return None


def _clock(text: str) -> dict[str, int | None] | None:
    """Hour as written, minute, second, and the hour of the day, None if nothing says which half of it.

    With a colon alone it is a reading of a clock by its form: two digits up to 59 after an hour up to 24.
    """
    named = _NAMED_HOURS.get(text.lower().removeprefix("12 "))
    if named is not None:
        return {"hour": 12, "minute": 0, "second": 0, "hour of day": named}
    if match := Form.CLOCK.fullmatch(_clock_in_digits(text)):
        part = (match["part"] or match["night"] or "").lower()
        half = (match["half"] or {"": "", "morning": "a"}.get(part, "p")).upper()
        if match["m"] is None and not half and not match["clock"]:
            return None
        hour, minute, second = (int(match[name] or 0) for name in "hms")
    elif match := Form.CHINESE_CLOCK.fullmatch(text):
        half = "" if match["half"] is None else "A" if match["half"] in ("凌晨", "早上", "上午") else "P"
        hour, minute, second = int(match["h"]), 30 if match["thirty"] else int(match["m"] or 0), 0
    else:
        return None
    if hour > 24 or (hour == 0 and half == "P"):
        return None
    of_day = (hour % 12 + 12 * (half == "P") if half else None) if 1 <= hour <= 12 else hour % 24
    return {"hour": hour, "minute": minute, "second": second, "hour of day": of_day}


def _clock_in_digits(text: str) -> str:
    """`quarter to three at night` as `2:45 at night`; any other text as it is."""
    spoken = Form.SPOKEN_CLOCK.fullmatch(text)
    hour = parse_quantity(spoken["hour"].lower()) if spoken else None
    if spoken is None or hour is None or not (spoken["way"] or spoken["clock"]):
        return text
    minutes = _PARTS_OF_HOUR.get((spoken["minutes"] or "").lower()) or parse_quantity(spoken["minutes"].lower())
    if minutes is None or not 0 <= minutes.value < 60 or not 1 <= hour.value <= 12:
        return text
    is_before = spoken["way"] in ("to", "till", "before")
    moment = int(60 * hour.value + (-minutes.value if is_before else minutes.value))
    return f"{(moment // 60 - 1) % 12 + 1}:{moment % 60:02}{spoken['half'] or ''}"


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
    written = [(match[name] or "").strip() for name in ("low_unit", "unit")]
    first, last = (unit if unit in ("", "%") else canonical_unit(unit) for unit in written)
    if first is None or last is None or (first and first != last):
        return None
    low, high = (Fraction(match[name].replace(",", "")) for name in ("low", "high"))
    return low, high, last


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
_SUBSCRIPT_MARKS = dict.fromkeys(map(ord, "_{} "))


def _telephone(text: str) -> tuple[str, ...] | None:
    """The digits of a telephone number however grouped; of shorter numbers with hyphens, the groups."""
    if Form.VERSION.fullmatch(text):
        return tuple(text.split("."))
    if not Form.TELEPHONE.fullmatch(text):
        return None
    groups = tuple(Form.DIGITS.findall(text))
    digits = "".join(groups)
    return (digits,) if len(digits) >= TELEPHONE_DIGITS else groups


def _code(text: str) -> str | None:
    """A capital and digits right after a letter are no product: `A4`, `V8`; `H_2O` and `H2O` are the same."""
    if not Form.CODE.fullmatch(text) or Form.FUNCTION.search(text) or text.islower():
        return None
    if not Form.LETTER_BEFORE_DIGIT.search(text) and not (Form.FORMULA.fullmatch(text) and "_" in text):
        return None
    return _bare_code(text) if parse_quantity(text) is None else None


def _bare_code(text: str) -> str:
    """The text without its subscripts' marks, and without its case if it has several letters."""
    bare = text.translate(_SUBSCRIPT_MARKS)
    return bare if sum(map(str.isalpha, bare)) == 1 else bare.casefold()


def _based(text: str) -> tuple[str, int | str] | None:
    match = Form.BASED.fullmatch(text)
    if match is None:
        return None
    base = match[2]
    return _digits(match[1]), (
        int(base) if base.isdigit() else WORDS["bases"].index(base) + 2 if base in WORDS["bases"] else base
    )


def _digits(written: str) -> str:
    return written.replace(",", "").upper()


def _residue(text: str) -> tuple[int, int] | None:
    match = Form.RESIDUE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2] or match[3]))


# Sequences, words and relations


def is_text(text: str) -> bool:
    """Return whether the text is words; sympy would read `north` as a product, equal to `thorn`."""
    if Latex.WORDS_ONLY.fullmatch(text) and not Latex.FUNCTION_NAME.fullmatch(text):
        return True
    if Latex.GEOMETRIC_NAME.search(text) and "=" not in text:
        return True
    return Latex.LONG_WORD.search(without_environments(text)) is not None and parse_quantity(text) is None


def has_relation(text: str) -> bool:
    """Return whether the text is an equation, an inequality or a membership."""
    return Latex.RELATION.search(text) is not None


def elements(inside: str, *, length: int | None = None) -> list[str]:
    """Return the elements of a list without its brackets: between commas, semicolons, `and` and `or`, else between spaces.

    Spaces separate numbers, or whatever is `length` pieces: `9 100` is a number with its thousands apart.
    """
    items, spaced = split_top_level(Latex.LIST_WORDS.sub(", ", inside)), inside.split()
    if len(items) != 1 or len(spaced) < 2:
        return items
    if length is None:
        return spaced if all(map(Latex.PLAIN_NUMBER.fullmatch, spaced)) else items
    return spaced if len(spaced) == length and r"\pm" not in inside and parse_quantity(inside) is None else items


def gold_sequence(gold: str) -> list[str] | None:
    """Return the elements of a gold sequence, or None for a single value: `1,234` is a number, `1, 234` two."""
    gold = Latex.TUPLE_ASSIGNMENT.sub("", gold)
    pair = enclosing_delimiters(gold)
    if pair is None and (parse_quantity(gold) is not None or read_notation(gold) is not None):
        return None
    items = elements(inside_of(gold, pair))
    if all(items) and (len(items) > 1 or pair is None):
        items = [signed for item in items for signed in both_signs(item)]
    is_sequence = len(items) > 1 or (pair is not None and pair[0] in ("[", r"\{"))
    return items if is_sequence and all(items) else None


def both_signs(item: str) -> list[str]:
    r"""The two values of an item with one `\pm`: `1\pm i` → `1+i`, `1-i`."""
    if item.count(r"\pm") != 1 or is_text(item):
        return [item]
    return [Latex.PLUS_MINUS.sub(sign, item) for sign in ("+", "-")]


# The table of readers; each returns what it has found, or None


def _plain_number(text: str) -> Quantity | None:
    number = parse_quantity(text)
    return number if number is not None and not number.unit and not number.percent else None


def _interval(text: str) -> Region | None:
    region = parse_region(text)
    return None if region is None or is_plain_pair(region) else region


def _sequence_in(*openings: str | None) -> Reader:
    """A reader of sequences that begin with one of these delimiters; None is for no delimiter."""

    def read(text: str) -> list[str] | None:
        bare = without_membership(text)[0]
        pair = enclosing_delimiters(bare)
        return gold_sequence(bare) if (pair and pair[0]) in openings else None

    return read


def _unit(text: str) -> str | None:
    """The unit of a number or an expression."""
    number = parse_quantity(text)
    return (number.unit or "%") if number is not None else split_unit(without_membership(text)[0])[1] or None


def _currency(text: str) -> str | None:
    unit = _unit(text)
    return unit if unit in CURRENCIES else None


def _if(condition: Callable[[str], object]) -> Reader:
    return lambda text: True if condition(without_membership(text)[0]) else None


def _is_computation(text: str) -> bool:
    mixed = Latex.MIXED_NUMBER.fullmatch(text)
    is_worked_out = mixed is not None and int(mixed[1] or mixed[3]) < int(mixed[2] or mixed[4])
    return Latex.COMPUTATION.fullmatch(text) is not None and not is_worked_out


PRECEDENCE: tuple[tuple[Kind, Reader], ...] = (
    (Kind.NUMBER, _plain_number),
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
    (Kind.MATRIX, parse_matrix),
    (Kind.INTERVAL, _interval),
    (Kind.LIST, _sequence_in(None)),
    (Kind.SET, _sequence_in(r"\{", "{")),
    (Kind.TUPLE, _sequence_in("(", "[")),
    (Kind.MONEY, _currency),
    (Kind.QUANTITY, _unit),
    (Kind.WORD, _if(is_text)),
    (Kind.EQUATION, _if(has_relation)),
    (Kind.COMPUTATION, _if(_is_computation)),
    (Kind.EXPRESSION, _if(lambda text: True)),
)
"""The order in which a text is read: the first reader that finds something decides, and the last one always does."""
_NOTATIONS = tuple(row for row in PRECEDENCE if row[0].name in HINTS)
