r"""Units and counted things as they are written behind a value: `12 cm`, `36\pi square inches`, `3 apples`."""

import re
from fractions import Fraction

_SHORT_UNITS = (
    "mm cm dm m km nm in ft yd mi mg g kg t lb oz ms s min h mL ml L K N kN J kJ W kW V mV A mA C F Hz kHz MHz Pa kPa "
    "eV keV MeV GeV mol rad deg ha mph cal kcal atm T Wb cc dB psi fps kWh"
).split()
_SPELLED = {
    "mm": "millimeter millimeters millimetre millimetres",
    "cm": "centimeter centimeters centimetre centimetres",
    "dm": "decimeter decimeters decimetre decimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "mg": "milligram milligrams",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "t": "ton tons tonne tonnes",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "d": "day days",
    "wk": "week weeks",
    "mo": "month months",
    "yr": "year years",
    "L": "liter liters litre litres",
    "mL": "milliliter milliliters millilitre millilitres",
    "N": "newton newtons",
    "J": "joule joules",
    "W": "watt watts",
    "V": "volt volts",
    r"\Omega": "ohm ohms",
    "A": "ampere amperes amp amps",
    "K": "kelvin kelvins",
    "Hz": "hertz",
    "mol": "mole moles",
    "rad": "radian radians",
    "degree": r"degree degrees deg ^\circ",
    "dollar": "dollar dollars USD",
    "cent": "cent cents ¢",
    "euro": "euro euros EUR",
    "GBP": "GBP",
    "yen": "yen JPY",
    "": "unit units",
}
_UNITS = {unit: unit for unit in _SHORT_UNITS if unit not in ("ml", "deg")}
_UNITS |= {"ml": "mL", r"\Omega": r"\Omega", r"\AA": r"\AA"}
_UNITS |= {spelling: unit for unit, spellings in _SPELLED.items() for spelling in spellings.split()}
_COMPOSED = {"mph": "mi/h", "fps": "ft/s", r"^\circC": "celsius", r"^\circF": "fahrenheit"}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}

_NAME = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_FACTOR = rf"(?:(?:square|sq\.?|cubic|cu\.?)[ ])?(?:{_NAME})(?![A-Za-z])(?:\^(?:\d|\{{-?\d\}})|[ ](?:squared|cubed))?"
_PHRASE = re.compile(
    rf"(?:\^\\circ[ ]?[CF](?![A-Za-z])|{_FACTOR}(?:[ ]?(?:/|per[ ]|\\cdot[ ]?)[ ]?{_FACTOR})*)", re.ASCII
)
_PHRASE_AT_END = re.compile(
    rf"(?P<value>.*[^\s\\A-Za-z^_(\[{{/=+-])(?P<space>[ ]?)(?P<unit>{_PHRASE.pattern})", re.ASCII
)
_AFTER_COMMAND = re.compile(
    rf"(?P<value>.*\\(?:pi|alpha|beta|theta))(?P<space>[ ])(?P<unit>{_PHRASE.pattern})", re.ASCII
)
_THINGS = re.compile(r"[A-Za-z]{4,20}(?:[ -][A-Za-z]{2,20}){0,3}", re.ASCII)
_SHORT_THINGS = frozenset("men ways cars dogs cats boys eggs pens bags cups toys days sets rows".split())
_NO_THINGS = re.compile(
    r"(?:and|or|to|if|when|is|are|not|but|mod|either|maybe|more|less|than|million|billion|trillion|thousand|hundred"
    r"|dozen|sqrt|sin|cos|tan|log|even|odd|times|plus|minus|over|squared|cubed|remainder|percent)\b",
    re.IGNORECASE,
)
_ANGLE_OF_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis\}?)\s?\(?[\d.]+$")
_BEHIND = re.compile(
    rf"(?:\$|\\\)|\\\]|\s|\\[ ,;!]|~){{0,4}}(?:\\(?:text|mathrm)\s*\{{\s*|\\?[ ~])?(?P<unit>{_PHRASE.pattern})",
    re.ASCII,
)
_BASE_UNITS: dict[str, tuple[str, Fraction | int]] = {
    "mm": ("m", Fraction(1, 1000)),
    "cm": ("m", Fraction(1, 100)),
    "dm": ("m", Fraction(1, 10)),
    "m": ("m", 1),
    "km": ("m", 1000),
    "in": ("ft", Fraction(1, 12)),
    "ft": ("ft", 1),
    "yd": ("ft", 3),
    "mi": ("ft", 5280),
    "mg": ("g", Fraction(1, 1000)),
    "g": ("g", 1),
    "kg": ("g", 1000),
    "t": ("g", 10**6),
    "oz": ("lb", Fraction(1, 16)),
    "lb": ("lb", 1),
    "ms": ("s", Fraction(1, 1000)),
    "s": ("s", 1),
    "min": ("s", 60),
    "h": ("s", 3600),
    "d": ("s", 86_400),
    "wk": ("s", 604_800),
    "mL": ("L", Fraction(1, 1000)),
    "L": ("L", 1),
    "cent": ("dollar", Fraction(1, 100)),
    "dollar": ("dollar", 1),
}
_CHINESE = re.compile(r"[\u4e00-\u9fff]{1,4}")


def canonical_unit(written: str) -> str | None:
    """Return the canonical spelling of a unit or a counted thing, "" for `units`, or None for what is neither."""
    if _PHRASE.fullmatch(written):
        compact = written.replace(" per ", "/").replace("per ", "/")
        composed = _COMPOSED.get(compact.replace(" ", ""))
        return composed or "/".join(_canonical_factor(factor) for factor in re.split(r"[ ]?/[ ]?", compact))
    if _CHINESE.fullmatch(written):
        return written
    is_thing = written in _SHORT_THINGS or _THINGS.fullmatch(written)
    return written.lower() if is_thing and not any(map(_NO_THINGS.fullmatch, written.split())) else None


def split_unit(text: str) -> tuple[str, str]:
    r"""Return the value and the canonical unit behind it, "" where there is none: `36\pi square inches` → `36\pi`, `in^2`.

    A unit of one letter needs a space before it and no other letter in the value: `2m` and `a m` are products.
    """
    match = _PHRASE_AT_END.fullmatch(text) or _AFTER_COMMAND.fullmatch(text)
    if match is None:
        return text, ""
    letters = re.sub(r"\\[A-Za-z]+", "", match["value"])
    if re.search(r"[A-Za-z]", letters) or not re.search(r"\d|\\", match["value"]):
        return text, ""
    if re.fullmatch(r"[A-Za-z](?:\^.*)?", match["unit"]) and not match["space"]:
        return text, ""
    if match["unit"].startswith("^") and _ANGLE_OF_FUNCTION.search(match["value"]):
        return text, ""
    return match["value"].strip(), canonical_unit(match["unit"]) or ""


def unit_behind(text: str, position: int) -> str:
    r"""Return the unit as written right behind a value: ` cm`, `$ cm`, `\text{ cm}`; "" where there is none.

    A single letter counts at the end of a phrase only.
    """
    match = _BEHIND.match(text, position)
    if match is None:
        return ""
    unit, rest = match["unit"], text[match.end() :]
    is_letter = len(unit.partition("^")[0]) == 1 and unit[0].isalpha()
    return "" if is_letter and not re.match(r"[}\s$]*(?:[.,;:)]|$)", rest) else unit


def conversion(unit: str, *, into: str) -> Fraction | None:
    """Return what one `unit` is in the other, both canonical, or None where they measure different things."""
    factors = [_scaled(unit), _scaled(into)]
    if factors[0] is None or factors[1] is None or factors[0][0] != factors[1][0]:
        return None
    return factors[0][1] / factors[1][1]


def _scaled(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """The base units with their powers, and how many of them the unit is; None where a part has no base unit here."""
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for index, part in enumerate(unit.split("/")):
        name, _, exponent = part.partition("^")
        if name not in _BASE_UNITS or not re.fullmatch(r"\d?", exponent):
            return None
        base, size = _BASE_UNITS[name]
        power = int(exponent or 1) * (1 if index == 0 else -1)
        powers[base] = powers.get(base, 0) + power
        factor *= Fraction(size) ** power
    return tuple(sorted(powers.items())), factor


def _canonical_factor(factor: str) -> str:
    words = factor.replace("{", "").replace("}", "").split()
    power = next((_POWERS[word.rstrip(".")] for word in words if word.rstrip(".") in _POWERS), "")
    power = {"squared": "^2", "cubed": "^3"}.get(words[-1], power)
    name = next(word for word in words if word.rstrip(".") not in _POWERS)
    if name.startswith("^"):
        return _UNITS[name]
    name, caret, exponent = name.partition("^")
    unit = _UNITS.get(name, name)
    return unit + (caret + exponent if caret else power) if unit else ""
