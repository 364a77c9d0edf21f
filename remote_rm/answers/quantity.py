r"""Numbers as answers write them, read exactly: `1,234.50`, `3\frac{1}{2}`, `50%`, `1.5\times10^3`, `12 cm`, `five`."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from remote_rm.answers.units import canonical_unit, conversion

ROUNDED_FROM_PLACES = 2
"""From this many decimal places on, a gold answer counts as rounded; below it is exact."""
MAX_EXPONENT = 300

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.(?P<places>\d*))?|\.(?P<bare_places>\d+))"
_QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)[ ]?)?(?:\\frac\{{(?P<top>-?{_INTEGER})\}}\{{(?P<bottom>-?{_INTEGER})\}})
        |(?:(?P<spaced_whole>\d+)[ ])?(?P<slash_top>\d{{1,3}}(?:,\d{{3}})+|\d+)/(?P<slash_bottom>{_INTEGER})
        |(?P<head>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\{{(?P<repeating>\d{{1,50}})\}}
        |10\^\{{(?P<bare_power>-?\d+)\}}
        |(?P<decimal>{_DECIMAL})
         (?:[eE](?P<e>[-+]?\d+)|[ ]?(?:\\times[ ]?|\\cdot[ ]?|[*])10\^(?:(?P<digit>\d)|\{{(?P<power>[-+]?\d+)\}}))?
    )(?P<scale>[ ](?:thousand|million|billion|trillion|dozen))?
    (?P<gap>[ ]?)(?P<percent>%|percent(?![A-Za-z]))?(?P<unit>\S.*)?""",
    re.VERBOSE | re.ASCII,
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SMALL_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TEN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_WORD_VALUES = {word: value for value, word in enumerate(_SMALL_WORDS)} | {
    word: 10 * value for value, word in enumerate(_TEN_WORDS, start=2)
}
_WORD_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_NUMBER_WORDS = re.compile(r"[a-z]+(?:(?:-| and |[ ])[a-z]+){0,8}")
MAX_DIGITS = 400
"""A text with more digits than this is no number but a string: reading it takes quadratic time."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number with what was written beside it."""

    value: Fraction
    places: int
    """Decimal places as written; 0 for integers, fractions and powers of ten, which are exact."""
    percent: bool
    unit: str
    """The canonical unit, or "" where none is written."""


def parse_quantity(text: str) -> Quantity | None:
    """Return the number that a normalised text is, or None where it is anything more than one number and its unit."""
    match = _QUANTITY.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if match is None:
        number = parse_number_words(text) if text[:1].isalpha() else None
        return None if number is None else Quantity(value=Fraction(number), places=0, percent=False, unit="")
    unit = _unit_of(match)
    value = _magnitude(match)
    if unit is None or value is None:
        return None
    if match["scale"]:
        value *= _SCALES[match["scale"].strip()]
    scaled = match["e"] or match["power"] or match["digit"] or match["scale"]
    places = 0 if scaled else len(match["places"] or match["bare_places"] or "")
    signed = -value if match["sign"] == "-" else value
    return Quantity(value=signed, places=places, percent=match["percent"] is not None, unit=unit)


def parse_number_words(text: str) -> int | None:
    """Return the number that the words are, or None for anything else."""
    lowered = text.lower()
    if not _NUMBER_WORDS.fullmatch(lowered):
        return None
    words = [word for word in re.split("[- ]", lowered) if word != "and"]
    if (
        not words
        or not all(word in _WORD_VALUES or word in _WORD_SCALES for word in words)
        or words[0] in _WORD_SCALES
    ):
        return None
    total, group = 0, 0
    for before, word in zip(["", *words], words, strict=False):
        if word == "hundred":
            group *= 100
        elif word in _WORD_SCALES:
            total, group = total + group * _WORD_SCALES[word], 0
        elif before in _TEN_WORDS and 0 < _WORD_VALUES[word] < 10 or not before or before in _WORD_SCALES:
            group += _WORD_VALUES[word]
        else:
            return None
    return total + group


def same_quantity(answer: Quantity, *, gold: Quantity) -> bool:
    """Return whether the answer is the gold number.

    A gold with two or more decimal places is met by any answer that rounds to it (3.14159 meets 3.14, 3.1 does not);
    every other gold is exact (16.2 does not meet 16). A unit or a percent sign may be missing on one side; different
    units of one measure are converted (1200 cm meets 12 m).
    """
    measures = ["%" if quantity.percent else quantity.unit for quantity in (answer, gold)]
    if all(measures) and measures[0] != measures[1]:
        factor = conversion(measures[0], into=measures[1])
        if factor is None:
            return False
        answer = replace(answer, value=answer.value * factor)
    tolerance = Fraction(1, 2 * 10**gold.places) if gold.places >= ROUNDED_FROM_PLACES else Fraction(0)
    return any(abs(value - gold.value) <= tolerance for value in _readings(answer, gold=gold))


def _readings(answer: Quantity, *, gold: Quantity) -> list[Fraction]:
    """The values that the answer may stand for on the gold's scale."""
    if answer.percent == gold.percent:
        return [answer.value]
    if gold.percent:
        return [answer.value, answer.value * 100]
    # Beside a gold below one, a percentage can only mean the fraction: 0.5% is not 0.5.
    as_fraction = answer.value / 100
    return [as_fraction, answer.value] if abs(gold.value) > 1 else [as_fraction]


def _magnitude(match: re.Match[str]) -> Fraction | None:
    if match["repeating"] is not None:
        cycle = Fraction(int(match["repeating"]), 10 ** len(match["repeating"]) - 1)
        fixed = Fraction(int(match["fixed"] or 0)) + cycle
        return int(match["head"] or 0) + fixed / 10 ** len(match["fixed"])
    if match["top"] is not None or match["slash_top"] is not None:
        whole = int(match["whole"] or match["spaced_whole"] or 0)
        top, bottom = _integer(match["top"] or match["slash_top"]), _integer(match["bottom"] or match["slash_bottom"])
        return whole + Fraction(top, bottom) if bottom else None
    exponent = int(match["e"] or match["power"] or match["digit"] or match["bare_power"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    mantissa = match["decimal"] or "1"
    return Fraction(mantissa.replace(",", "").replace(" ", "")) * Fraction(10) ** exponent


def _integer(written: str) -> int:
    return int(written.replace(",", "").replace(" ", ""))


def _unit_of(match: re.Match[str]) -> str | None:
    """The canonical unit, or None for what is no unit: `2m` may be a product, `2 m` and `2cm` are lengths."""
    written = match["unit"]
    if written is None:
        return ""
    # What is counted may follow a percent sign (`25% of them` is no number), and has a space before it.
    unit = canonical_unit(written) if not match["percent"] else None
    is_letter = len(written.partition("^")[0]) == 1 and written[0].isascii()
    is_attached_word = len(written) > 3 and written == unit and written.isascii() and written.isalpha()
    return None if not match["gap"] and (is_letter or is_attached_word) else unit
