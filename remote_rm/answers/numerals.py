"""Numbers in words, English and Chinese: `twenty-one`, `three quarters`, `two and a half`, `十二`, `二分之一`, `百分之二十`."""

from __future__ import annotations

import re
from fractions import Fraction

_SMALL_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TEN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_WORD_VALUES = {word: value for value, word in enumerate(_SMALL_WORDS)} | {
    word: 10 * value for value, word in enumerate(_TEN_WORDS, start=2)
}
_WORD_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_NUMBER_WORDS = re.compile(r"[a-z]+(?:(?:-| and |[ ])[a-z]+){0,8}")
_PARTS = {
    2: "half halves",
    3: "third thirds",
    4: "quarter quarters fourth fourths",
    5: "fifth fifths",
    6: "sixth sixths",
    7: "seventh sevenths",
    8: "eighth eighths",
    9: "ninth ninths",
    10: "tenth tenths",
    12: "twelfth twelfths",
    20: "twentieth twentieths",
    100: "hundredth hundredths",
    1000: "thousandth thousandths",
    10**6: "millionth millionths",
}
PART_WORDS = {word: Fraction(1, parts) for parts, words in _PARTS.items() for word in words.split()}
"""What one of them is of a whole: `quarters` → 1/4."""
NUMBER_WORDS = frozenset((*_WORD_VALUES, *_WORD_SCALES, *PART_WORDS, "dozen", "trillion"))

_DIGITS = "零一二三四五六七八九"
_DIGIT_VALUES = {digit: value for value, digit in enumerate(_DIGITS)} | {"〇": 0, "两": 2}
_STEPS = {"十": 10, "百": 100, "千": 1000}
_MYRIADS = {"亿": 10**8, "万": 10**4}
CHINESE_SCALES = {
    "百": 10**2,
    "千": 10**3,
    "万": 10**4,
    "十万": 10**5,
    "百万": 10**6,
    "千万": 10**7,
    "亿": 10**8,
    "万亿": 10**12,
}
CHINESE_NUMERAL = (
    rf"负?(?:一?半|百分之[{_DIGITS}〇两十百点]+|[{_DIGITS}〇两十](?:[{_DIGITS}〇两十百千万亿点又]|(?<!\d)分之)*)"
)
"""A pattern for what may be a number in Chinese characters."""
_DIGIT_FRACTION = re.compile(r"(\d{1,20})分之(\d{1,20})", re.ASCII)
MAX_CHARS = 100


def parse_number_words(text: str) -> int | None:
    """Return the whole number that the English words are, or None for anything else."""
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


def parse_words(text: str) -> Fraction | None:
    """Return the number that the words of one language are, fractions and signs included, or None for anything else.

    `three quarters` → 3/4, `two and a half` → 5/2, `minus five` → -5, `三点五` → 7/2; a percentage in words is one
    hundredth of its number: `百分之二十` → 1/5.
    """
    if len(text) > MAX_CHARS:
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
    places = [_WORD_VALUES.get(digit, 10) for digit in digits]
    if value is None or max(places) > 9:
        return None
    return Fraction(f"{value}.{''.join(map(str, places))}")


def _spoken_fraction(text: str) -> Fraction | None:
    """`three quarters`, `one-half`, `a third`, `half`; `third` alone is a rank."""
    *count, part = re.split("[- ]", text)
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
    in_digits = _DIGIT_FRACTION.fullmatch(text)
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


_PHRASE = re.compile(r"[A-Za-z]{2,20}(?:[ -][A-Za-z]{2,20}){0,7}", re.ASCII)
_ORDINALS = re.compile(
    r"(?:thir|four|fif|six|seven|eigh|nine?|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million|billion)ths?"
)
_NUMBER_CHANGING = frozenset(
    (
        "squared cubed factorial factorials doubled tripled quadrupled halved divided multiplied raised times plus minus "
        "less fewer more over under above below zero negative positive inverse inverted reciprocal root power powers "
        "exponent percent percents percentage tens hundreds thousands millions billions trillions dozens doubles triples "
        "halves fold folds and or nor if unless when is are was were be equals not never no none but maybe perhaps either "
        "neither than then except excluding without wrong incorrect false mod modulo base remainder even odd sqrt sin cos tan "
        "log off short too ish almost nearly barely hardly"
    ).split()
)
_NO_PLURALS = frozenset(
    (
        "is was has does its this yes as us thus plus minus less unless always perhaps besides across versus sometimes "
        "towards upwards downwards backwards forwards afterwards equals makes gives means seems differs fails lacks loses "
        "needs exceeds misses lies his hers ours theirs doubts guess guesses stands becomes remains adds subtracts"
    ).split()
)
_PLURALS = frozenset(
    (
        "people men women children mice geese teeth feet fish sheep deer dice oxen cattle police aircraft spacecraft "
        "offspring fruit staff persons personnel data media criteria vertices indices axes radii foci formulae bacteria "
        "them cents kids"
    ).split()
)
_MEASURES = frozenset(
    (
        "teaspoon tablespoon cup pint gallon quart barrel litre item piece unit point person page student mark slice pizza "
        "cake pie bottle box bag apple orange egg book pen pencil dog cat boy girl man woman child way solution triangle "
        "square circle side edge vertex face cube dot star line car bus day team game goal vote step turn lap mile time "
        "intersection root pair set group row column table chair room house tree flower ball card coin ticket family"
    ).split()
)
"""What may stand in the singular, as behind one and behind a fraction."""
_JOINTS = frozenset("of in on per with from at for to inside within among".split())
_REMARKS = frozenset(
    "total altogether each left remaining apart away long tall wide high deep old only overall now today".split()
)
_IN_ALL = re.compile(r"(?:^| )in (?:total|all)$")

_CLASSIFIERS = "个只条张本支枝名位头匹辆颗棵件块枚朵瓶杯碗盒箱袋粒间座架台艘人家户种群双套组根片串"
_BARE_CLASSIFIERS = "次层遍步圈倍题页行列岁套项面边角点组届场门台节号级楼折人"
_CHINESE = re.compile(rf"[{_CLASSIFIERS}](?P<thing>[\u4e00-\u9fff]{{0,4}})|[{_BARE_CLASSIFIERS}]")


def counted_thing(text: str) -> str | None:
    """Return the canonical name of what is counted, "" for things left unnamed, or None for words that count nothing.

    `red apples` → `red apple`, `in total` → ``, `只羊` → `羊`; `wrong`, `halves` and `or more` → None.
    """
    chinese = _CHINESE.fullmatch(text)
    if chinese is not None:
        return chinese["thing"] or ""
    text = _IN_ALL.sub("", text).strip()
    if not text:
        return ""
    if not _PHRASE.fullmatch(text):
        return None
    words = re.split("[ -]", text.lower())
    if changes_number(text):
        return None
    while words and words[-1] in _REMARKS:
        words.pop()
    if not words:
        return ""
    joint = next((place for place, word in enumerate(words) if word in _JOINTS), len(words))
    if joint == 0 or joint > 4 or len(words) - joint > 5:
        return None
    head = _singular(words[joint - 1])
    return None if head is None else " ".join([*words[: joint - 1], head, *words[joint:]])


def changes_number(words: str) -> bool:
    """Return whether words behind a number make it another one, or none: `halves`, `below zero`, `divided by two`, `or 6`."""
    return any(
        word in _NUMBER_CHANGING or word in NUMBER_WORDS or _ORDINALS.fullmatch(word) is not None
        for word in re.split(r"[\s-]+", words.lower())
    )


def _singular(noun: str) -> str | None:
    """The noun without its plural's ending, or None for a word that names nothing that is counted."""
    if noun in _PLURALS or noun in _MEASURES:
        return noun
    if len(noun) < 4 or not noun.endswith("s") or noun.endswith("ss") or noun in _NO_PLURALS:
        return None
    if noun.endswith("ies") and len(noun) > 4:
        return f"{noun[:-3]}y"
    return noun[:-2] if noun.endswith(("ses", "xes", "zes", "ches", "shes")) else noun[:-1]
