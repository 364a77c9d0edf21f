r"""Units and counted things as they are written behind a value: `12 cm`, `36\pi square inches`, `3 apples`."""

import re
from fractions import Fraction
from functools import lru_cache

from remote_rm.answers.counted import counted_thing
from remote_rm.answers.measures import NAMES, SIZES, pattern_of

_NAME = pattern_of(NAMES)
_POWER = r"(?:\^(?:\d|\{-?\d\})|[ ](?:squared|cubed))"
_FACTOR = rf"(?:(?:square|sq\.?|cubic|cu\.?)[ ]|平方|立方)?(?:{_NAME})(?![A-Za-z]){_POWER}?"
_ONE_FACTOR = re.compile(
    rf"(?P<before>(?:square|sq|cubic|cu)\b\.?[ ]|平方|立方)?(?P<name>{_NAME})(?P<after>{_POWER})?", re.ASCII
)
_POWERS = dict.fromkeys(("square", "sq", "squared", "平方"), "2") | dict.fromkeys(
    ("cubic", "cu", "cubed", "立方"), "3"
)
_TEMPERATURE = r"(?:\^\\circ[ ]?|degrees?[ ]|deg[ ]?)(?P<scale>[CF]|[Cc]elsius|[Ff]ahrenheit)(?![A-Za-z])"
_TEMPERATURE_ALONE = re.compile(_TEMPERATURE)
_COMPOSED = {"mph": "mi/h", "fps": "ft/s", "kph": "km/h"}
_PHRASE = re.compile(
    rf"(?:{_TEMPERATURE.replace('?P<scale>', '?:')}|{_FACTOR}(?:[ ]?(?:/|per[ ]|每|\\cdot[ ]?)[ ]?{_FACTOR})*)",
    re.ASCII,
)
_PHRASE_AT_END = re.compile(
    rf"(?P<value>.*[^\s\\A-Za-z^_(\[{{/=+-])(?P<space>[ ]?)(?P<unit>{_PHRASE.pattern})", re.ASCII
)
_AFTER_COMMAND = re.compile(
    rf"(?P<value>.*\\(?:pi|alpha|beta|theta))(?P<space>[ ])(?P<unit>{_PHRASE.pattern})", re.ASCII
)
_ANGLE_OF_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis\}?)\s?\(?[\d.]+$")
_MEASURED = re.compile(
    rf"(?P<unit>{_PHRASE.pattern})[ ](?:long|tall|wide|high|deep|old|away|apart|thick|in length)", re.ASCII
)
_BEHIND = re.compile(
    rf"(?:\$|\\\)|\\\]|\s|\\[ ,;!]|~){{0,4}}(?:\\(?:text|mathrm)\s*\{{\s*|\\?[ ~])?(?P<unit>{_PHRASE.pattern})",
    re.ASCII,
)


_LETTER_IN_PROSE = re.compile(r"\s[msghNJWVL]\s[a-z]{2,}")


@lru_cache(maxsize=2048)
def canonical_unit(written: str) -> str | None:
    """Return the canonical spelling of a unit or a counted thing, "" for `units`, or None for what is neither."""
    temperature = _TEMPERATURE_ALONE.fullmatch(written)
    if temperature is not None:
        return "celsius" if temperature["scale"][0] in "Cc" else "fahrenheit"
    if _PHRASE.fullmatch(written):
        compact = written.replace(" per ", "/").replace("per ", "/").replace("每", "/")
        return _COMPOSED.get(compact) or "/".join(map(_canonical_factor, re.split(r"[ ]?/[ ]?", compact)))
    measured = _MEASURED.fullmatch(written)
    return canonical_unit(measured["unit"]) if measured is not None else counted_thing(written)


def is_unit(written: str) -> bool:
    """Return whether it is a unit of measure, not a counted thing."""
    return _PHRASE.fullmatch(written) is not None


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

    A single letter counts at the end of a phrase, and the usual ones before a word: `12 s here`.
    """
    match = _BEHIND.match(text, position)
    if match is None:
        return ""
    unit, rest = match["unit"], text[match.end() :]
    is_letter = (
        len(unit.partition("^")[0]) == 1 and unit[0].isalpha() and not _LETTER_IN_PROSE.match(text, match.start())
    )
    return "" if is_letter and not re.match(r"(?:\\?\}|[\s$])*(?:[.,;:)]|$)", rest) else unit


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
        if name not in SIZES or not re.fullmatch(r"\d?", exponent):
            return None
        base, dimension, size = SIZES[name]
        power = int(exponent or 1) * (1 if index == 0 else -1)
        powers[base] = powers.get(base, 0) + power * dimension
        factor *= size**power
    return tuple(sorted(powers.items())), factor


def _canonical_factor(factor: str) -> str:
    if r"\cdot" in factor:
        return factor.replace(" ", "")
    match = _ONE_FACTOR.fullmatch(factor)
    if match is None:
        return factor
    power = (match["after"] or "").strip(" ^{}") or (match["before"] or "").strip(" .")
    power = _POWERS.get(power, power)
    unit = NAMES[match["name"]]
    return f"{unit}^{power}" if unit and power and power != "1" else unit
