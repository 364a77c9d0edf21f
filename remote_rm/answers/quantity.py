r"""Numbers as answers write them, read exactly: `1,234.50`, `3\frac{1}{2}`, `50%`, `1.5\times10^3`, `12 cm`, `five`, `3 quarters`."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from remote_rm.answers.numerals import CHINESE_NUMERAL, CHINESE_SCALES, PART_WORDS
from remote_rm.answers.numerals import parse_number_words as parse_number_words
from remote_rm.answers.numerals import parse_words
from remote_rm.answers.units import canonical_unit, conversion, is_unit

ROUNDED_FROM_PLACES = 2
"""A gold with fewer decimal places than this, or fewer significant digits, is exact; any other counts as rounded."""
MAX_EXPONENT = 300

_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.(?P<places>\d*))?|\.(?P<bare_places>\d+))"
_PART = "|".join(sorted(PART_WORDS, key=len, reverse=True))
_CHINESE_SCALE = "|".join(sorted(CHINESE_SCALES, key=len, reverse=True))
_QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)[ ]?)?(?:\\frac\{{(?P<top>-?{_INTEGER})\}}\{{(?P<bottom>-?{_INTEGER})\}})
        |(?:(?P<spaced_whole>\d+)[ ])?(?P<slash_top>\d{{1,3}}(?:,\d{{3}})+|\d+)/(?P<slash_bottom>{_INTEGER})
        |(?P<head>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\{{(?P<repeating>\d{{1,50}})\}}
        |10\^\{{(?P<bare_power>-?\d+)\}}
        |(?P<decimal>{_DECIMAL})
         (?:[eE](?P<e>[-+]?\d+)|[ ]?(?:\\times[ ]?|\\cdot[ ]?|[*])10\^(?:(?P<digit>\d)|\{{(?P<power>[-+]?\d+)\}}))?
    )(?:[ ](?P<scale>(?:hundred|thousand|million|billion|trillion|dozen|{_PART})\b)
       |[ ]?(?P<chinese_scale>{_CHINESE_SCALE})(?![克米瓦焦卡帕伏安牛赫欧分]))?
    (?P<gap>[ ]?)(?P<percent>%|percent(?![A-Za-z]))?(?P<unit>\S.*)?""",
    re.VERBOSE | re.ASCII,
)
_SCALES: dict[str, int | Fraction] = {
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **PART_WORDS,
    **CHINESE_SCALES,
}
_IN_CHINESE = re.compile(rf"(?P<number>{CHINESE_NUMERAL}|\d+分之\d+)(?P<unit>.*)")
_NUMBER_START = re.compile(
    r"(?:minus|negative|an?|half|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty)\b",
    re.IGNORECASE,
)
_JOINED = re.compile(r"(?<=[A-Za-z\u4e00-\u9fff.])(?:,? and |, ?| )?(?=\d)")
_FEET_AND_INCHES = re.compile(r"(\d+)' ?(\d+)(?:\"|'')")
MAX_DIGITS = 400
"""A text with more digits than this is no number but a string: reading it takes quadratic time."""
MAX_CACHED = 4096


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number with what was written beside it."""

    value: Fraction
    places: int
    """Decimal places as written; 0 for integers, fractions and powers of ten, which are exact."""
    percent: bool
    unit: str
    """The canonical unit, or "" where none is written."""


# Both sides of a comparison are asked several times what they are, and the samples of a prompt share their gold.
@lru_cache(maxsize=MAX_CACHED)
def parse_quantity(text: str) -> Quantity | None:
    """Return the number that a normalised text is, or None where it is anything more than one number and its unit."""
    match = _QUANTITY.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if match is None or "分之" in text:
        return _in_words(text) if text[:1].isalpha() or "分之" in text else None
    unit = _unit_of(match)
    value = _magnitude(match)
    if value is None:
        return None
    if unit is None:
        return _compound(text)
    scale = match["scale"] or match["chinese_scale"]
    if scale:
        value *= _SCALES[scale]
    scaled = match["e"] or match["power"] or match["digit"] or scale
    places = 0 if scaled else len(match["places"] or match["bare_places"] or "")
    signed = -value if match["sign"] == "-" else value
    return Quantity(value=signed, places=places, percent=match["percent"] is not None, unit=unit)


def same_quantity(answer: Quantity, *, gold: Quantity) -> bool:
    """Return whether the answer is the gold number.

    A rounded gold (`rounded_places`) is met by any answer that rounds to it (3.14159 meets 3.14, 3.1 does not); every
    other gold is exact (16.2 does not meet 16). A unit or a percent sign may be missing on one side; different units of
    one measure are converted (1200 cm meets 12 m).
    """
    measures = ["%" if quantity.percent else quantity.unit for quantity in (answer, gold)]
    if all(measures) and measures[0] != measures[1]:
        factor = conversion(measures[0], into=measures[1])
        if factor is None:
            return False
        answer = replace(answer, value=answer.value * factor)
    places = rounded_places(gold)
    return any(
        value == gold.value or (places is not None and _rounded(value, places) == gold.value)
        for value in _readings(answer, gold=gold)
    )


def rounded_places(gold: Quantity) -> int | None:
    """Return to how many decimal places a gold is rounded, or None where it is exact.

    It counts as rounded from two decimal places and two significant digits on: 3.14 and 0.33 do, 16.2 and 0.01 do not,
    as an answer may be half as large again as 0.01 and still round to it.
    """
    if gold.places < ROUNDED_FROM_PLACES or abs(gold.value) * 10**gold.places < 10 ** (ROUNDED_FROM_PLACES - 1):
        return None
    return gold.places


def _rounded(value: Fraction, places: int) -> Fraction:
    """Half away from zero, so that a number rounds to one gold only."""
    nearest = Fraction(int(abs(value) * 10**places + Fraction(1, 2)), 10**places)
    return -nearest if value < 0 else nearest


def _readings(answer: Quantity, *, gold: Quantity) -> list[Fraction]:
    """The values that the answer may stand for on the gold's scale; below one, 0.5% can only mean 0.005."""
    if answer.percent == gold.percent:
        return [answer.value]
    factor = 100 if gold.percent else Fraction(1, 100)
    written = gold.value if gold.percent else answer.value
    return [answer.value * factor, answer.value] if abs(written) >= 1 else [answer.value * factor]


def _in_words(text: str) -> Quantity | None:
    """`five`, `three quarters of an hour` is none; `twelve cm`, `五个苹果`, `百分之二十`."""
    if text.isascii():
        return _in_english(text) if _NUMBER_START.match(text) else None
    match = _IN_CHINESE.fullmatch(text)
    if match is None:
        return None
    value = parse_words(match["number"])
    unit = canonical_unit(match["unit"]) if match["unit"] else ""
    if value is None or unit is None:
        return None
    percent = match["number"].startswith("百分之")
    return Quantity(value=value * 100 if percent else value, places=0, percent=percent, unit=unit)


def _in_english(text: str) -> Quantity | None:
    """The longest run of number words in front, and the unit behind it."""
    words = text.split(" ")
    for end in range(len(words), 0, -1):
        value = parse_words(" ".join(words[:end])) if words[end - 1] != "and" else None
        if value is not None:
            rest = " ".join(words[end:])
            percent = rest in ("%", "percent", "per cent")
            unit = canonical_unit(rest) if rest and not percent else ""
            return None if unit is None else Quantity(value=value, places=0, percent=percent, unit=unit)
    return None


def _compound(text: str) -> Quantity | None:
    """Several units of one measure, the larger one first, in the last of them: `1 hour 30 minutes` → 90 minutes."""
    feet = _FEET_AND_INCHES.fullmatch(text)
    parts = [f"{feet[1]} ft", f"{feet[2]} in"] if feet is not None else _JOINED.split(text)
    if not 2 <= len(parts) <= 4:
        return None
    read = [_measured(part.strip()) for part in parts]
    measured = [part for part in read if part is not None]
    if len(measured) < len(parts):
        return None
    last = measured[-1][1]
    if last in ("fen", "m") and measured[0][1] == "h":
        last = "min"
        measured[-1] = (measured[-1][0], last)
    total, larger = Fraction(0), None
    for value, unit in measured:
        size = conversion(unit, into=last)
        if size is None or (larger is not None and (size >= larger or value * size >= larger)):
            return None
        total, larger = total + value * size, size
    return Quantity(value=total, places=0, percent=False, unit=last)


def _measured(part: str) -> tuple[Fraction, str] | None:
    """The value and the unit of one part of a compound quantity, where one letter may follow the number: `1h30m`."""
    match = _QUANTITY.fullmatch(part)
    if (
        match is None
        or match["unit"] is None
        or any(match[name] for name in ("scale", "chinese_scale", "percent", "sign"))
    ):
        return None
    value, unit = _magnitude(match), canonical_unit(match["unit"])
    return (value, unit) if value is not None and unit else None


def _magnitude(match: re.Match[str]) -> Fraction | None:
    if match["repeating"] is not None:
        cycle = Fraction(int(match["repeating"]), 10 ** len(match["repeating"]) - 1)
        fixed = Fraction(int(match["fixed"] or 0)) + cycle
        return int(match["head"] or 0) + fixed / 10 ** len(match["fixed"])
    if match["top"] is not None or match["slash_top"] is not None:
        whole = int(match["whole"] or match["spaced_whole"] or 0)
        top, bottom = _integer(match["top"] or match["slash_top"]), _integer(match["bottom"] or match["slash_bottom"])
        is_mixed = whole and bottom and top >= bottom
        return whole + Fraction(top, bottom) if bottom and not is_mixed else None
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
    if match["percent"]:
        return None
    is_letter = len(written.partition("^")[0]) == 1 and written[0].isascii()
    is_attached_thing = written.isascii() and not is_unit(written)
    return None if not match["gap"] and (is_letter or is_attached_thing) else canonical_unit(written)
