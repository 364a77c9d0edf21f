r"""The kinds of values, and notations with a meaning of their own: a date, a clock reading, a ratio, a code, ...

`COMPARED` says which kinds are compared. Two texts in one such notation are the same if their keys agree: `14:30` and
`2:30 PM`, `January 5, 2024` and `2024-01-05`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from math import gcd

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
_PLAIN_DIGITS = re.compile(r"[-+]?[\d.]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A text in one of the notations, as what it means."""

    kind: Kind
    key: Hashable


@lru_cache(maxsize=4096)
def read_notation(text: str) -> Written | None:
    """Return what a normalised text in one of the notations means, or None for any other text."""
    if len(text) > MAX_CHARS or _PLAIN_DIGITS.fullmatch(text):
        return None
    for hint, kind, reader in _READERS:
        if hint.search(text):
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

_YES = frozenset("yes true correct 是 是的 对 对的 正确".split())
_NO = frozenset("no false incorrect 否 不是 不 不对 错 错误 不正确".split())
_YES_NO = re.compile(
    rf"({'|'.join(sorted(_YES | _NO, key=len, reverse=True))})(?:$|[,.;:!，。]\s*(?!.*(?:\b(?:yes|no|true|false|or|alternatively)\b|(?<![^\s,;，；、])(?:是|否|对|错)(?![^\s,.;，。；、])|\s['\"]))(.*)$)",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"\bnot\b|n't\b")
_SUBJECT = r"(?:the |this |it |its )?(?:[a-z]+ ){0,4}?"
_PHRASES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:{_SUBJECT}has |there (?:is|are) )?(?:no (?:real )?solutions?|no real roots?|none)[.!]?",
        rf"(?:{_SUBJECT}(?:does not exist|doesn't exist)|dne|does not exist)[.!]?",
        rf"(?:{_SUBJECT}has |there (?:is|are) )?(?:an )?infinite(?:ly many| number of)(?: (?:real )?solutions?)?[.!]?",
        rf"(?:{_SUBJECT}is )?undefined[.!]?",
    )
)


def _yes_or_no(text: str) -> bool | None:
    """`Yes, it is.` is yes; `Yes or no` and `Yes, it is not` are neither."""
    match = _YES_NO.fullmatch(text)
    if match is None:
        return None
    is_yes = match[1].lower() in _YES
    return None if is_yes and _DENIAL.search(match[2] or "") else is_yes


def _phrase(text: str) -> int | None:
    """`There are no solutions.` is `No solution`."""
    return next((index for index, phrase in enumerate(_PHRASES) if phrase.fullmatch(text)), None)


# Dates and times of day

_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = r"(?P<month>[A-Z][a-z]{2,8})\.?"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\.?,? )?(?:the |on )?"
_DATES = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"(?P<year>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<day>\d{1,2})",
        r"(?P<m>\d{1,2})(?P<mark>[-/.])(?P<day>\d{1,2})(?P=mark)(?P<year>\d{4})",
        r"(?P<m>\d{1,2})/(?P<day>\d{1,2})/(?P<short_year>\d\d)",
        r"(?P<year>\d{4}) ?年 ?(?P<m>\d{1,2}) ?月(?: ?(?P<day>\d{1,2}) ?[日号])?",
        r"(?P<m>\d{1,2}) ?月 ?(?P<day>\d{1,2}) ?[日号]",
        rf"{_WEEKDAY}{_MONTH} (?P<day>\d{{1,2}})(?:,? ?(?P<year>\d{{4}}))?",
        rf"{_WEEKDAY}(?P<day>\d{{1,2}}) (?:of )?{_MONTH}(?:,? (?P<year>\d{{4}}))?",
        rf"{_MONTH},? (?P<year>\d{{4}})",
    )
)
_CLOCK = re.compile(
    r"(?:(?:at|about) )?(?P<h>\d{1,2})(?::(?P<m>[0-5]\d)(?::(?P<s>[0-5]\d))?)?"
    r"(?: ?(?P<half>[AP])M|(?: o'?clock)?(?: in the (?P<part>morning|afternoon|evening)| at (?P<night>night))|(?P<clock> o'?clock))?",
    re.IGNORECASE | re.ASCII,
)
_CHINESE_CLOCK = re.compile(
    r"(?P<half>凌晨|早上|上午|中午|下午|傍晚|晚上)?(?P<h>\d{1,2})(?:点|时(?=\d)|:(?=\d\d))(?:(?P<m>[0-5]?\d)分?|(?P<exact>整|钟)|(?P<thirty>半))?",
    re.ASCII,
)
_NAMED_TIMES = {"noon": (0, "P"), "midday": (0, "P"), "midnight": (0, "A")}


def _date(text: str) -> tuple[int | None, int, int | None] | None:
    """Year, month and day; in `01/05/2024` the month is first, unless it cannot be one or full stops separate them."""
    for pattern in _DATES:
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
    match = _CLOCK.fullmatch(text)
    if match is not None:
        part = (match["part"] or match["night"] or "").lower()
        half = (match["half"] or {"": "", "morning": "a"}.get(part, "p")).upper()
        if match["m"] is None and not half and not match["clock"]:
            return None
        hour, minute, second = (int(match[name] or 0) for name in "hms")
    else:
        match = _CHINESE_CLOCK.fullmatch(text)
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

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?"
_RANGE = re.compile(
    rf"(?P<opened>(?:from|between) )?(?P<low>(?P<minus>-)?{_NUMBER})(?P<low_unit>%|(?: ?[^\W\d]+\.?))??"
    rf"(?P<joint>-| to | and |至|到)(?P<high>-?{_NUMBER})(?P<unit>[ ]?[^\d\s].*)?",
    re.ASCII,
)
_RATIO = re.compile(rf"{_NUMBER}(?:(?: ?: ?|比| to ){_NUMBER})+", re.ASCII)
MAX_SPOKEN_RATIO = 12
"""`3 to 4` is a ratio, `10 to 20` a range: a ratio in words has no common factor and no larger term than this."""


def _range(text: str) -> tuple[Fraction, Fraction, str] | None:
    """Low end, high end, unit: `10-20`, `from 10 to 20`, `10%-20%`; so is a score `3-2`, whichever comes first."""
    match = _RANGE.fullmatch(text)
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
    if not _RATIO.fullmatch(text):
        return None
    written = re.split(":|比| to ", text.replace(",", ""))
    if " to " in text and not (len(written) == 2 and _is_spoken_ratio(*written)):
        return None
    terms = [Fraction(term) for term in written]
    if not all(terms) or any(re.match(r"0\d", term) for term in written):
        return (Fraction(0), *terms)
    return tuple(term / terms[0] for term in terms)


# Telephone numbers, codes, numbers with a base or a modulus

_TELEPHONE = re.compile(
    r"\+?(?:\d{1,3}[ .-]?)?\(\d{2,5}\)[ .-]?\d{2,5}(?:[ .-]\d{2,5})*|\+\d{1,3}(?:[ .-]?\d{2,5}){2,5}|\d+(?:-\d+){2,}|\d{3}\.\d{3}\.\d{4}",
    re.ASCII,
)
_VERSION = re.compile(r"\d{1,5}(?:\.\d{1,5}){2,4}", re.ASCII)
TELEPHONE_DIGITS = 7
_CODE = re.compile(r"(?=.*[A-Za-z])(?:[A-Za-z0-9]|_(?:\d+|\{\d+\}))+", re.ASCII)
_LETTER_BEFORE_DIGIT = re.compile(r"[A-Za-z]\d")
_FORMULA = re.compile(r"(?:[A-Z][a-z]?(?:_(?:\d|\{\d+\}))?){2,}", re.ASCII)
_FUNCTION = re.compile(
    r"(?:sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|cis)(?![a-z])", re.IGNORECASE
)
_BASED = re.compile(r"(-?(?=[A-Fa-f]*\d)[0-9A-Fa-f,]+)_\{?(\d+|[a-z]+)\}?", re.ASCII)
_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_RESIDUE = re.compile(
    r"(?:[A-Za-z]\\equiv ?)?(-?\d{1,300}) ?(?:\\pmod\{(\d{1,300})\}|\(?mod (\d{1,300})\)?)", re.ASCII
)


def _telephone(text: str) -> tuple[str, ...] | None:
    """The digits of a telephone number however grouped; of shorter numbers with hyphens, the groups."""
    if _VERSION.fullmatch(text):
        return tuple(text.split("."))
    if not _TELEPHONE.fullmatch(text):
        return None
    digits = "".join(re.findall(r"\d", text))
    return (digits,) if len(digits) >= TELEPHONE_DIGITS else tuple(re.findall(r"\d+", text))


def _code(text: str) -> str | None:
    """A capital and digits right after a letter are no product: `A4`, `V8`; `H_2O` and `H2O` are the same."""
    if not _CODE.fullmatch(text) or _FUNCTION.search(text):
        return None
    if text.islower():
        return None
    if not _LETTER_BEFORE_DIGIT.search(text) and not (_FORMULA.fullmatch(text) and "_" in text):
        return None
    return code_of(text) if parse_quantity(text) is None else None


def code_of(text: str) -> str:
    """The text without its subscripts' marks, and without its case if it has several letters."""
    bare = re.sub(r"[_{} ]", "", text)
    return bare if sum(map(str.isalpha, bare)) == 1 else bare.casefold()


def _based(text: str) -> tuple[str, int | str] | None:
    match = _BASED.fullmatch(text)
    return None if match is None else (_digits(match[1]), _base(match[2]))


def _digits(written: str) -> str:
    return written.replace(",", "").upper()


def _base(written: str) -> int | str:
    return int(written) if written.isdigit() else _BASES.index(written) + 2 if written in _BASES else written


def _residue(text: str) -> tuple[int, int] | None:
    match = _RESIDUE.fullmatch(text)
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


_READERS: tuple[tuple[re.Pattern[str], Kind, Callable[[str], Hashable | None]], ...] = (
    (re.compile(rf"^(?:{'|'.join(_YES | _NO)})", re.IGNORECASE), Kind.YES_NO, _yes_or_no),
    (
        re.compile(r"\b(?:no|none|exist|doesn't|dne|infinite|infinitely|undefined)\b", re.IGNORECASE),
        Kind.NO_VALUE,
        _phrase,
    ),
    (re.compile(r"\d[-/.]\d+[-/.]\d|[月年]|[A-Z][a-z]{2}.*\d|\d [A-Zo]"), Kind.DATE, _date),
    (re.compile(r"\d:\d\d|\d ?[AaPp]M|clock|\d[点时:]|noon|midday|midnight| in the | at night"), Kind.CLOCK, _clock),
    (re.compile(r"\d(?: ?: ?|比| to )\d"), Kind.RATIO, _ratio),
    (re.compile(r"\d.*(?:-| to | and |至|到)-?\d"), Kind.RANGE, _range),
    (re.compile(r"\d[-.) ]\d+[-. ]\d|^\(\d+\)|^\+\d"), Kind.TELEPHONE, _telephone),
    (re.compile(r"[0-9A-Fa-f]_"), Kind.BASED, _based),
    (re.compile("mod"), Kind.RESIDUE, _residue),
    (re.compile(r"[A-Za-z][\d_]"), Kind.CODE, _code),
)
_RULES: dict[Kind, Callable] = {Kind.CLOCK: _same_clock, Kind.RANGE: _same_range, Kind.RESIDUE: _same_residue}


# Where one side alone is in a notation

_CHOICES = re.compile(r"(?=[A-J]{2,10}$)A?B?C?D?E?F?G?H?I?J?")
_LISTED_CHOICES = re.compile(r"\(?[A-J]\)?(?:(?:[,;&\s]|and)+\(?[A-J]\)?)+")
_BARE_DIGITS = re.compile(r"-?[0-9A-Fa-f,]+", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,300}", re.ASCII)


def is_choices(text: str) -> bool:
    """Return whether the text is several letters of options in order, such as `AC`."""
    return _CHOICES.fullmatch(text) is not None


def same_choices(answer: str, gold: str) -> bool | None:
    """`A and C` is `AC`; None if either is something else."""
    if not _CHOICES.fullmatch(gold) or not _LISTED_CHOICES.fullmatch(answer):
        return None
    return sorted(re.findall("[A-J]", answer)) == list(gold)


def same_without_base(based: Written, text: str, *, is_gold: bool) -> bool:
    """A gold's base may be left out, 2516 is `2516_8`; a base that the gold does not have must be ten."""
    assert isinstance(based.key, tuple)
    digits, base = based.key
    return (is_gold or base == 10) and _BARE_DIGITS.fullmatch(text) is not None and digits == _digits(text)


def same_without_modulus(residue: Written, text: str) -> bool:
    """Without its modulus an answer must be the residue itself: 10 is not `3 (mod 7)`, but `10 (mod 7)` is."""
    assert isinstance(residue.key, tuple)
    return _INTEGER.fullmatch(text) is not None and int(text) == residue.key[0]


def same_as_quotient(ratio: Written, text: str) -> bool:
    """`3:4` is 3/4; a ratio of three terms is no number."""
    number, terms = parse_quantity(text), ratio.key
    assert isinstance(terms, tuple)
    return (
        number is not None and not number.unit and len(terms) == 2 and terms[0] == 1 and number.value * terms[1] == 1
    )
