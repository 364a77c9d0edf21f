r"""Numbers as answers write them, read exactly: `1,234.50`, `3\frac{1}{2}`, `50%`, `1.5\times10^3`, `12 cm`, `five`, `十二`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from remote_rm.answers.lexer import PART_WORDS, TEN_WORDS, WORD_SCALES, WORD_VALUES, Match
from remote_rm.answers.lexer.values import CHINESE_DIGITS, CHINESE_SCALES, Number
from remote_rm.answers.units import canonical_unit, conversion, is_unit

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
        elif before in TEN_WORDS and 0 < WORD_VALUES[word] < 10 or not before or before in WORD_SCALES:
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
    if not text.isascii():
        return _chinese(text)
    words = text.lower()
    sign, bare = (-1, words.split(" ", 1)[1]) if words.startswith(("minus ", "negative ")) else (1, words)
    value = _english(bare)
    return None if value is None else sign * value


def _english(text: str) -> Fraction | None:
    whole = parse_number_words(text)
    if whole is not None:
        return Fraction(whole)
    before, _, after = text.partition(" point ")
    if after:
        return _spoken_decimal(before, after.split())
    before, _, part = text.rpartition(" and ")
    fraction = _spoken_fraction(part)
    if fraction is None or not before:
        return fraction
    whole = parse_number_words(before)
    return None if whole is None or fraction >= 1 else whole + fraction


def _spoken_decimal(whole: str, digits: list[str]) -> Fraction | None:
    value = parse_number_words(whole)
    places = [WORD_VALUES.get(digit, 10) for digit in digits]
    if value is None or max(places) > 9:
        return None
    return Fraction(f"{value}.{''.join(map(str, places))}")


def _spoken_fraction(text: str) -> Fraction | None:
    """`three quarters`, `one-half`, `a third`, `half`; `third` alone is a rank."""
    *count, part = text.replace("-", " ").split(" ")
    if part not in PART_WORDS:
        return None
    if not count:
        return PART_WORDS[part] if part == "half" else None
    number = 1 if count in (["a"], ["an"]) else parse_number_words(" ".join(count))
    return None if number is None else number * PART_WORDS[part]


def _chinese(text: str) -> Fraction | None:
    if text.startswith("负"):
        value = _chinese(text[1:])
        return None if value is None else -value
    in_digits = Number.DIGIT_FRACTION.fullmatch(text)
    if in_digits is not None:
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
    before, _, after = text.partition("点")
    whole = _chinese_integer(before)
    if whole is None or not after:
        return None if whole is None or "点" in text else Fraction(whole)
    return Fraction(f"{whole}.{_in_digits(after)}") if set(after) <= set(_DIGIT_VALUES) else None


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

_SCALES: dict[str, int | Fraction] = {
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **PART_WORDS,
    **CHINESE_SCALES,
}
MAX_DIGITS = 400
"""A text with more digits than this is no number but a string: reading it takes quadratic time."""
MAX_CACHED = 4096


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number with what was written next to it."""

    value: Fraction
    places: int
    """Decimal places as written; 0 for integers, fractions and powers of ten, which are exact."""
    percent: bool
    unit: str
    """The canonical unit, or "" if none is written."""


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
        value *= _SCALES[scale]
    scaled = match["e"] or match["power"] or match["digit"] or scale
    places = 0 if scaled else len(match["places"] or match["bare_places"] or "")
    signed = -value if match["sign"] == "-" else value
    return Quantity(value=signed, places=places, percent=match["percent"] is not None, unit=unit)


def _with_mark(text: str) -> Quantity | None:
    r"""`6'`, `6''`, and degrees with minutes in degrees: `22^\circ30'` → 22.5."""
    if marked := Number.WITH_MARK.fullmatch(text):
        unit = "'" if marked[2] == "'" else '"'
        return Quantity(value=Fraction(marked[1]), places=0, percent=False, unit=unit)
    angle = Number.DEGREES_AND_MINUTES.fullmatch(text)
    if angle is None:
        return None
    minutes, seconds = Fraction(angle[2]), Fraction(angle[3] or 0)
    if minutes >= 60 or seconds >= 60:
        return None
    value = int(angle[1]) + minutes / 60 + seconds / 3600
    return Quantity(value=value, places=0, percent=False, unit="degree")


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
    """Return to how many decimal places a gold is rounded, or None if it is exact.

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
    """The values that the answer may mean on the gold's scale; below one, 0.5% can only mean 0.005."""
    if answer.percent == gold.percent:
        return [answer.value]
    factor = 100 if gold.percent else Fraction(1, 100)
    written = gold.value if gold.percent else answer.value
    return [answer.value * factor, answer.value] if abs(written) >= 1 else [answer.value * factor]


def _in_words(text: str) -> Quantity | None:
    """`five`, `three quarters of an hour` is none; `twelve cm`, `五个苹果`, `百分之二十`."""
    if text.isascii():
        return _in_english(text) if Number.NUMBER_START.match(text) else None
    match = Number.IN_CHINESE.fullmatch(text)
    if match is None:
        return None
    value = parse_words(match["number"])
    unit = canonical_unit(match["unit"]) if match["unit"] else ""
    if value is None or unit is None:
        return None
    percent = match["number"].startswith("百分之")
    return Quantity(value=value * 100 if percent else value, places=0, percent=percent, unit=unit)


def _in_english(text: str) -> Quantity | None:
    """The longest run of number words in front, and the unit after it."""
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
    feet = Number.FEET_AND_INCHES.fullmatch(text)
    parts = [f"{feet[1]} ft", f"{feet[2]} in"] if feet is not None else Number.JOINED.split(text)
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
    """The value and the unit of one part of a compound quantity, in which one letter may follow the number: `1h30m`."""
    match = Number.QUANTITY.fullmatch(part)
    if (
        match is None
        or match["unit"] is None
        or any(match[name] for name in ("scale", "chinese_scale", "percent", "sign"))
    ):
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
