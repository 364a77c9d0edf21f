r"""Numbers and units as answers write them, read exactly: `1,234.50`, `3\frac{1}{2}`, `50%`, `12 cm`, `3 apples`, `十二`."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from remote_rm.answers.lexer import (
    CHINESE_DIGITS,
    NAMES,
    NUMBER_WORDS,
    PART_WORDS,
    SCALES,
    SIZES,
    WORD_SCALES,
    WORD_VALUES,
    WORDS,
    Match,
    Number,
    Unit,
)

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


_DIGIT_VALUES = {digit: value for value, digit in enumerate(CHINESE_DIGITS)} | {"〇": 0, "两": 2}
_STEPS = {"十": 10, "百": 100, "千": 1000}
_MYRIADS = {"亿": 10**8, "万": 10**4}
MAX_WORDS_CHARS = 100


def parse_number_words(text: str) -> int | None:
    """Return the whole number that the English words are, or None for anything else."""
    lowered = text.lower()
    if not Number.NUMBER_WORDS.fullmatch(lowered):
        return None
    words = [word for word in lowered.replace("-", " ").split(" ") if word != "and"]
    if not words or not all(word in WORD_VALUES or word in WORD_SCALES for word in words) or words[0] in WORD_SCALES:
        return None
    total, group = 0, 0
    for before, word in zip(["", *words], words, strict=False):
        if word == "hundred":
            group *= 100
        elif word in WORD_SCALES:
            total, group = total + group * WORD_SCALES[word], 0
        elif before in WORDS["tens"] and 0 < WORD_VALUES[word] < 10 or not before or before in WORD_SCALES:
            group += WORD_VALUES[word]
        else:
            return None
    return total + group


def parse_words(text: str) -> Fraction | None:
    """Return the number that the words of one language are, fractions and signs included, or None for anything else.

    `three quarters` → 3/4, `two and a half` → 5/2, `minus five` → -5, `三点五` → 7/2; a percentage in words is one
    hundredth of its number: `百分之二十` → 1/5.
    """
    if len(text) > MAX_WORDS_CHARS:
        return None
    lowered = text.lower()
    minus = next((word for word in ("minus ", "negative ", "负") if lowered.startswith(word)), "")
    bare = lowered[len(minus) :]
    value = _english(bare) if text.isascii() else _chinese(bare)
    return -value if minus and value is not None else value


def _english(text: str) -> Fraction | None:
    whole = parse_number_words(text)
    if whole is not None:
        return Fraction(whole)
    before, _, after = text.partition(" point ")
    if after:
        whole, digits = parse_number_words(before), [WORD_VALUES.get(digit, 10) for digit in after.split()]
        is_decimal = whole is not None and max(digits) < 10
        return Fraction(f"{whole}.{''.join(map(str, digits))}") if is_decimal else None
    before, _, part = text.rpartition(" and ")
    fraction = _spoken_fraction(part)
    if fraction is None or not before:
        return fraction
    whole = parse_number_words(before)
    return None if whole is None or fraction >= 1 else whole + fraction


def _spoken_fraction(text: str) -> Fraction | None:
    """`three quarters`, `one-half`, `a third`, `half`; `third` alone is a rank."""
    *count, part = text.replace("-", " ").split(" ")
    if part not in PART_WORDS or (not count and part != "half"):
        return None
    number = 1 if count in ([], ["a"], ["an"]) else parse_number_words(" ".join(count))
    return None if number is None else number * PART_WORDS[part]


def _chinese(text: str) -> Fraction | None:
    if in_digits := Number.DIGIT_FRACTION.fullmatch(text):
        return Fraction(int(in_digits[2]), int(in_digits[1])) if int(in_digits[1]) else None
    if text in ("半", "一半"):
        return Fraction(1, 2)
    whole, _, fraction = text.rpartition("又")
    bottom, _, top = fraction.partition("分之")
    if not top:
        return None if whole else _chinese_decimal(text)
    parts = 100 if bottom == "百" else _chinese_integer(bottom)
    number, added = _chinese_decimal(top), _chinese_integer(whole) if whole else 0
    return None if number is None or added is None or not parts else added + number / parts


def _chinese_decimal(text: str) -> Fraction | None:
    before, point, after = text.partition("点")
    whole = _chinese_integer(before)
    if whole is None or not point:
        return None if whole is None else Fraction(whole)
    return Fraction(f"{whole}.{_in_digits(after)}") if after and set(after) <= set(_DIGIT_VALUES) else None


def _chinese_integer(text: str) -> int | None:
    """`两百零五` → 205, `二〇二四` → 2024; what is left open in speech, as `一百二`, is none."""
    if len(text) > 1 and set(text) <= set(_DIGIT_VALUES):
        return int(_in_digits(text))
    for mark, size in _MYRIADS.items():
        before, found, after = text.partition(mark)
        if found:
            high, low = _chinese_integer(before), _chinese_integer(after.removeprefix("零")) if after else 0
            return None if high is None or low is None or low >= size else high * size + low
    total, digit, last_step = 0, None, 10_000
    for position, character in enumerate(text):
        if character in _STEPS and _STEPS[character] < last_step and (digit or (character == "十" and position == 0)):
            last_step = _STEPS[character]
            total, digit = total + (digit or 1) * last_step, None
        elif character == "零" and len(text) > 1 and digit is None:
            last_step = min(last_step, 100)
        elif character in _DIGIT_VALUES and digit is None and (character != "零" or len(text) == 1):
            digit = _DIGIT_VALUES[character]
        else:
            return None
    is_short_for_more = digit and last_step in (100, 1000) and "零" not in text and total
    return None if not text or is_short_for_more else total + (digit or 0)


def _in_digits(text: str) -> str:
    return "".join(str(_DIGIT_VALUES[character]) for character in text)


ROUNDED_FROM_PLACES = 2
"""A gold with fewer decimal places than this, or fewer significant digits, is exact; any other counts as rounded."""
MAX_EXPONENT = 300

MAX_DIGITS = 400
"""A text with more digits than this is no number but a string: reading it takes quadratic time."""
MAX_CACHED = 4096


class Quantity(NamedTuple):
    """A number with what was written next to it."""

    value: Fraction
    unit: str = ""
    """The canonical unit, or "" if none is written."""
    percent: bool = False
    places: int = 0
    """Decimal places as written; 0 for integers, fractions and powers of ten, which are exact."""


# Both sides of a comparison are asked several times what they are, and the samples of a prompt share their gold.
@lru_cache(maxsize=MAX_CACHED)
def parse_quantity(text: str) -> Quantity | None:
    """Return the number that a normalised text is, or None if it is anything more than one number and its unit."""
    if text[-1:] in ("'", '"') and (marked := _with_mark(text)) is not None:
        return marked
    match = Number.QUANTITY.fullmatch(text) if len(text) <= MAX_DIGITS else None
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
        value *= SCALES[scale]
    scaled = match["e"] or match["power"] or match["digit"] or scale
    places = 0 if scaled else len(match["places"] or match["bare_places"] or "")
    signed = -value if match["sign"] == "-" else value
    return Quantity(signed, unit, match["percent"] is not None, places)


def _with_mark(text: str) -> Quantity | None:
    r"""`6'`, `6''`, and degrees with minutes in degrees: `22^\circ30'` → 22.5."""
    if marked := Number.WITH_MARK.fullmatch(text):
        return Quantity(Fraction(marked[1]), "'" if marked[2] == "'" else '"')
    angle = Number.DEGREES_AND_MINUTES.fullmatch(text)
    if angle is None:
        return None
    minutes, seconds = Fraction(angle[2]), Fraction(angle[3] or 0)
    is_angle = minutes < 60 and seconds < 60
    return Quantity(int(angle[1]) + minutes / 60 + seconds / 3600, "degree") if is_angle else None


def same_quantity(answer: Quantity, *, gold: Quantity) -> bool:
    """Return whether the answer is the gold number.

    A rounded gold (`rounded_places`) is met by any answer that rounds to it (3.14159 meets 3.14, 3.1 does not); every
    other gold is exact (16.2 does not meet 16). A unit or a percent sign may be missing on one side; below one, 0.5% can
    only mean 0.005. Different units of one measure are converted (1200 cm meets 12 m).
    """
    measures = ["%" if quantity.percent else quantity.unit for quantity in (answer, gold)]
    factor: Fraction | None = Fraction(1)
    if all(measures) and measures[0] != measures[1]:
        factor = conversion(measures[0], into=measures[1])
    if factor is None:
        return False
    readings = [answer.value * factor]
    if answer.percent != gold.percent:
        written = gold.value if gold.percent else answer.value
        meant = readings[0] * (100 if gold.percent else Fraction(1, 100))
        readings = [meant, *readings] if abs(written) >= 1 else [meant]
    places = rounded_places(gold)
    return any(one == gold.value or (places is not None and _rounded(one, places) == gold.value) for one in readings)


def rounded_places(gold: Quantity) -> int | None:
    """Return to how many decimal places a gold is rounded, or None if it is exact.

    It counts as rounded from two decimal places and two significant digits on: 3.14 and 0.33 do, 16.2 and 0.01 do not,
    as an answer may be half as large again as 0.01 and still round to it.
    """
    is_exact = gold.places < ROUNDED_FROM_PLACES or abs(gold.value) * 10**gold.places < 10 ** (ROUNDED_FROM_PLACES - 1)
    return None if is_exact else gold.places


def _rounded(value: Fraction, places: int) -> Fraction:
    """Half away from zero, so that a number rounds to one gold only."""
    nearest = Fraction(int(abs(value) * 10**places + Fraction(1, 2)), 10**places)
    return -nearest if value < 0 else nearest


def _in_words(text: str) -> Quantity | None:
    """`five`, `twelve cm`, `五个苹果`, `百分之二十`; `three quarters of an hour` is none.

    In English, it is the longest run of number words in front with the unit after it.
    """
    if not text.isascii():
        match = Number.IN_CHINESE.fullmatch(text)
        value = parse_words(match["number"]) if match else None
        if match is None or value is None:
            return None
        percent, unit = match["number"].startswith("百分之"), match["unit"]
        return _with_unit(value * 100 if percent else value, unit, percent)
    words = text.split(" ") if Number.NUMBER_START.match(text) else []
    for end in range(len(words), 0, -1):
        value = parse_words(" ".join(words[:end])) if words[end - 1] != "and" else None
        if value is not None:
            rest = " ".join(words[end:])
            percent = rest in ("%", "percent", "per cent")
            return _with_unit(value, "" if percent else rest, percent)
    return None


def _with_unit(value: Fraction, written: str, percent: bool) -> Quantity | None:
    unit = canonical_unit(written) if written else ""
    return None if unit is None else Quantity(value, unit, percent)


def _compound(text: str) -> Quantity | None:
    """Several units of one measure, the larger one first, in the last of them: `1 hour 30 minutes` → 90 minutes."""
    feet = Number.FEET_AND_INCHES.fullmatch(text)
    parts = [f"{feet[1]} ft", f"{feet[2]} in"] if feet is not None else Number.JOINED.split(text)
    measured = [part for part in map(_measured, parts) if part is not None] if 2 <= len(parts) <= 4 else []
    if not measured or len(measured) < len(parts):
        return None
    if measured[-1][1] in ("fen", "m") and measured[0][1] == "h":
        measured[-1] = (measured[-1][0], "min")
    last, total, larger = measured[-1][1], Fraction(0), None
    for value, unit in measured:
        size = conversion(unit, into=last)
        if size is None or (larger is not None and (size >= larger or value * size >= larger)):
            return None
        total, larger = total + value * size, size
    return Quantity(total, last)


def _measured(part: str) -> tuple[Fraction, str] | None:
    """The value and the unit of one part of a compound quantity, in which one letter may follow the number: `1h30m`."""
    match = Number.QUANTITY.fullmatch(part.strip())
    names = ("scale", "chinese_scale", "percent", "sign")
    if match is None or match["unit"] is None or any(match[name] for name in names):
        return None
    value, unit = _magnitude(match), canonical_unit(match["unit"])
    return (value, unit) if value is not None and unit else None


def _magnitude(match: Match) -> Fraction | None:
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


def _unit_of(match: Match) -> str | None:
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
