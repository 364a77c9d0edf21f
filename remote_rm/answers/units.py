r"""Units and counted things as they are written after a value: `12 cm`, `36\pi square inches`, `3 apples`."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from remote_rm.answers.lexer.values import NAMES, NUMBER_WORDS, SIZES, WORDS, Unit

_POWERS = dict.fromkeys(("square", "sq", "squared", "平方"), "2") | dict.fromkeys(
    ("cubic", "cu", "cubed", "立方"), "3"
)
_COMPOSED = {"mph": "mi/h", "fps": "ft/s", "kph": "km/h"}


@lru_cache(maxsize=2048)
def canonical_unit(written: str) -> str | None:
    """Return the canonical spelling of a unit or a counted thing, or None for what is neither."""
    if temperature := Unit.TEMPERATURE_ALONE.fullmatch(written):
        return "celsius" if temperature["scale"][0] in "Cc" else "fahrenheit"
    if is_unit(written):
        compact = written.replace(" per ", "/").replace("per ", "/").replace("每", "/")
        return _COMPOSED.get(compact) or "/".join(map(_canonical_factor, Unit.PER.split(compact)))
    measured = Unit.MEASURED.fullmatch(written)
    return canonical_unit(measured["unit"]) if measured is not None else counted_thing(written)


def is_unit(written: str) -> bool:
    """Return whether it is a unit of measure, not a counted thing."""
    return Unit.PHRASE.fullmatch(written) is not None


def split_unit(text: str) -> tuple[str, str]:
    r"""Return the value and the canonical unit behind it, "" where there is none: `36\pi square inches` → `36\pi`, `in^2`.

    A unit of one letter needs a space before it and no other letter in the value: `2m` and `a m` are products.
    """
    match = Unit.PHRASE_AT_END.fullmatch(text) or Unit.AFTER_COMMAND.fullmatch(text)
    if match is None:
        return text, ""
    letters = Unit.COMMAND.sub("", match["value"])
    if Unit.LETTER.search(letters) or not Unit.DIGIT_OR_COMMAND.search(match["value"]):
        return text, ""
    if Unit.ONE_LETTER.fullmatch(match["unit"]) and not match["space"]:
        return text, ""
    if match["unit"].startswith("^") and Unit.ANGLE_OF_FUNCTION.search(match["value"]):
        return text, ""
    return match["value"].strip(), canonical_unit(match["unit"]) or ""


def unit_behind(text: str, position: int) -> str:
    r"""Return the unit as written right behind a value: ` cm`, `$ cm`, `\text{ cm}`; "" where there is none.

    A single letter counts at the end of a phrase, and the usual ones before a word: `12 s here`.
    """
    match = Unit.BEHIND.match(text, position)
    if match is None:
        return ""
    unit, rest = match["unit"], text[match.end() :]
    is_letter = (
        len(unit.partition("^")[0]) == 1 and unit[0].isalpha() and not Unit.LETTER_IN_PROSE.match(text, match.start())
    )
    return "" if is_letter and not Unit.END_OF_PHRASE.match(rest) else unit


GENERIC = "unit"
"""`24 square units` may be of any area, and `24 units` of anything but an area or a volume."""
MARKS = {"'": ("ft", "arcmin"), '"': ("in", "arcsec")}
"""What a mark after a number may stand for."""


def conversion(unit: str, *, into: str) -> Fraction | None:
    """Return what one `unit` is in the other, both canonical, or None if they measure different things."""
    if unit in MARKS or into in MARKS:
        pairs = ((one, other) for one in MARKS.get(unit, (unit,)) for other in MARKS.get(into, (into,)))
        return next((size for one, other in pairs if (size := conversion(one, into=other)) is not None), None)
    if GENERIC in (unit.partition("^")[0], into.partition("^")[0]):
        return Fraction(1) if _dimension(unit) == _dimension(into) else None
    factors = [_scaled(unit), _scaled(into)]
    if factors[0] is None or factors[1] is None or factors[0][0] != factors[1][0]:
        return None
    return factors[0][1] / factors[1][1]


def same_unit(unit: str, other: str) -> bool:
    """Return whether a number of the one is the same number of the other; true if one is missing."""
    return not unit or not other or unit == other or conversion(unit, into=other) == 1


def _dimension(unit: str) -> int:
    """2 for an area, 3 for a volume, and 1 for anything else."""
    name, _, power = unit.partition("^")
    if name == GENERIC:
        return int(power or 1)
    scaled = _scaled(unit)
    return scaled[0][0][1] if scaled is not None and len(scaled[0]) == 1 and scaled[0][0][0] == "m" else 1


def _scaled(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """The base units with their powers, and how many of them the unit is; None if a part has no base unit here."""
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for index, part in enumerate(unit.split("/")):
        name, _, exponent = part.partition("^")
        if name not in SIZES or not (exponent == "" or (len(exponent) == 1 and exponent.isdecimal())):
            return None
        base, dimension, size = SIZES[name]
        power = int(exponent or 1) * (1 if index == 0 else -1)
        powers[base] = powers.get(base, 0) + power * dimension
        factor *= size**power
    return tuple(sorted(powers.items())), factor


def _canonical_factor(factor: str) -> str:
    if r"\cdot" in factor:
        return factor.replace(" ", "")
    match = Unit.ONE_FACTOR.fullmatch(factor)
    if match is None:
        return factor
    power = (match["after"] or "").strip(" ^{}") or (match["before"] or "").strip(" .")
    power = _POWERS.get(power, power)
    unit = NAMES[match["name"]]
    return f"{unit}^{power}" if unit and power and power != "1" else unit


def counted_thing(text: str) -> str | None:
    """Return the canonical name of what is counted, "" for things left unnamed, or None for words that count nothing.

    `red apples` → `red apple`, `in total` → ``, `只羊` → `羊`; `wrong`, `halves` and `or more` → None.
    """
    chinese = Unit.CLASSIFIED.fullmatch(text)
    if chinese is not None:
        return chinese["thing"] or ""
    text = Unit.IN_ALL.sub("", text).strip()
    if not text:
        return ""
    if not Unit.COUNTED_WORDS.fullmatch(text):
        return None
    words = text.lower().replace("-", " ").split(" ")
    if changes_number(text):
        return None
    while words and words[-1] in WORDS["remarks"]:
        words.pop()
    if not words:
        return ""
    joint = next((place for place, word in enumerate(words) if word in WORDS["joints"]), len(words))
    if joint == 0 or joint > 4 or len(words) - joint > 5:
        return None
    head = _singular(words[joint - 1])
    return None if head is None else " ".join((*words[: joint - 1], head, *words[joint:]))


def changes_number(words: str) -> bool:
    """Return whether words after a number make it another one, or none: `halves`, `below zero`, `divided by two`, `or 6`."""
    return any(
        word in WORDS["changing"] or word in NUMBER_WORDS or Unit.ORDINALS.fullmatch(word) is not None
        for word in Unit.BETWEEN_WORDS.split(words.lower())
    )


def _singular(noun: str) -> str | None:
    """The noun without its plural's ending, or None for a word that names nothing that is counted."""
    if noun in WORDS["plurals"] or noun in WORDS["measures"]:
        return noun
    if len(noun) < 4 or not noun.endswith("s") or noun.endswith("ss") or noun in WORDS["no_plurals"]:
        return None
    if noun.endswith("ies") and len(noun) > 4:
        return f"{noun[:-3]}y"
    return noun[:-2] if noun.endswith(("ses", "xes", "zes", "ches", "shes")) else noun[:-1]
