r"""Numbers as they are written in answers, read exactly: `1,234.50`, `3/4`, `3\frac{1}{2}`, `50%`, `1.5\times10^3`, `12 cm`."""

import re
from dataclasses import dataclass
from fractions import Fraction

ROUNDED_FROM_PLACES = 2
"""From this many decimal places on, a gold answer counts as rounded; below it is exact."""
MAX_EXPONENT = 300

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.(?P<places>\d*))?|\.(?P<bare_places>\d+))"
_QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)(?:[ ]|(?=\\)))?(?:\\frac\{{(?P<top>{_INTEGER})\}}\{{(?P<bottom>{_INTEGER})\}})
        |(?:(?P<spaced_whole>\d+)[ ])?(?P<slash_top>{_INTEGER})/(?P<slash_bottom>{_INTEGER})
        |(?P<decimal>{_DECIMAL})(?:[eE](?P<e>[-+]?\d+)|(?:\\times[ ]?|\\cdot[ ]?|[*]|[x])10\^\{{?(?P<power>[-+]?\d+)\}}?)?
    )[ ]?(?P<percent>%|percent)?(?P<unit>\^\\circ|[A-Za-z]+(?:\^\{{?\d\}}?)?)?""",
    re.VERBOSE | re.ASCII,
)
_UNITS = {
    **{unit: unit for unit in "mm cm m km nm in ft yd mi mg g kg lb oz ms s min h mL ml L K N J W V Hz Pa".split()},
    **dict.fromkeys(("centimeter", "centimeters", "centimetre", "centimetres"), "cm"),
    **dict.fromkeys(("meter", "meters", "metre", "metres"), "m"),
    **dict.fromkeys(("kilometer", "kilometers", "kilometre", "kilometres"), "km"),
    **dict.fromkeys(("inch", "inches"), "in"),
    **dict.fromkeys(("foot", "feet"), "ft"),
    **dict.fromkeys(("mile", "miles"), "mi"),
    **dict.fromkeys(("gram", "grams"), "g"),
    **dict.fromkeys(("kilogram", "kilograms"), "kg"),
    **dict.fromkeys(("second", "seconds", "sec"), "s"),
    **dict.fromkeys(("minute", "minutes"), "min"),
    **dict.fromkeys(("hour", "hours", "hr", "hrs"), "h"),
    **dict.fromkeys(("liter", "liters", "litre", "litres"), "L"),
    **dict.fromkeys(("degree", "degrees", r"^\circ"), "degree"),
    **dict.fromkeys(("dollar", "dollars", "USD"), "dollar"),
    **dict.fromkeys(("unit", "units"), ""),
}


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
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    unit = _canonical_unit(match["unit"], after_space=" " in text)
    value = _magnitude(match)
    if unit is None or value is None:
        return None
    scaled = match["e"] or match["power"]
    places = 0 if scaled else len(match["places"] or match["bare_places"] or "")
    signed = -value if match["sign"] == "-" else value
    return Quantity(value=signed, places=places, percent=match["percent"] is not None, unit=unit)


def same_quantity(answer: Quantity, *, gold: Quantity) -> bool:
    """Return whether the answer is the gold number.

    A gold with two or more decimal places is met by any answer that rounds to it (3.14159 meets 3.14, 3.1 does not);
    every other gold is exact (16.2 does not meet 16). A unit or a percent sign may be missing on one side, but not differ.
    """
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
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
    if match["decimal"] is None:
        whole = int(match["whole"] or match["spaced_whole"] or 0)
        top, bottom = match["top"] or match["slash_top"], match["bottom"] or match["slash_bottom"]
        denominator = int(bottom.replace(",", ""))
        return whole + Fraction(int(top.replace(",", "")), denominator) if denominator else None
    exponent = int(match["e"] or match["power"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    return Fraction(match["decimal"].replace(",", "")) * Fraction(10) ** exponent


def _canonical_unit(written: str | None, *, after_space: bool) -> str | None:
    """The canonical unit, or None for what is no unit: `2m` may be a product, `2 m` and `2cm` are lengths."""
    if written is None:
        return ""
    name, caret, power = (written, "", "") if written == r"^\circ" else written.partition("^")
    unit = _UNITS.get(name)
    if unit is None or (len(name) == 1 and not after_space):
        return None
    return unit + caret + power.strip("{}")
