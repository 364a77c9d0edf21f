r"""Units and counted things as they are written after a value: `12 cm`, `36\pi square inches`, `3 apples`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from remote_rm.answers.lexer import NUMBER_WORDS

_PREFIXES = {
    "p": ("pico", -12, "皮"),
    "n": ("nano", -9, "纳"),
    "μ": ("micro", -6, "微"),
    "m": ("milli", -3, "毫"),
    "c": ("centi", -2, "厘"),
    "d": ("deci", -1, "分"),
    "h": ("hecto", 2, "百"),
    "k": ("kilo", 3, "千"),
    "M": ("mega", 6, "兆"),
    "G": ("giga", 9, "吉"),
    "T": ("tera", 12, "太"),
}
_MICRO = ("μ", "µ", r"\mu ")
# Unit: its names, its name in Chinese, and the prefixes that it is written with. No pm, which is a time of day.
_PREFIXED = {
    "m": ("meter metre", "米", "n μ m c d k"),
    "g": ("gram gramme", "克", "n μ m k"),
    "s": ("second sec", "秒", "n μ m"),
    "L": ("liter litre", "升", "μ m c d"),
    "J": ("joule", "焦 焦耳", "m k M G"),
    "W": ("watt", "瓦 瓦特", "m k M G"),
    "V": ("volt", "伏 伏特", "μ m k"),
    "A": ("ampere amp", "安 安培", "μ m k"),
    "Hz": ("hertz", "赫 赫兹", "k M G T"),
    "Pa": ("pascal", "帕 帕斯卡", "h k M G"),
    "N": ("newton", "牛 牛顿", "m k M"),
    "eV": ("electronvolt", "电子伏", "m k M G T"),
    r"\Omega": ("ohm", "欧 欧姆", "m k M"),
    "F": ("farad", "法拉", "p n μ m"),
    "C": ("coulomb", "库仑", "n μ m"),
    "T": ("tesla", "特斯拉", "μ m"),
    "mol": ("mole", "摩尔", "m k"),
    "cal": ("calorie", "卡 卡路里", "k"),
    "Wh": ("watt-hour", "瓦时", "k M G"),
    "K": ("kelvin", "开尔文", ""),
}
_SPELLED = {
    "m": "公尺",
    "km": "公里",
    "cm": "公分",
    "kg": "公斤 kgs",
    "s": "secs",
    "mL": "ml cc",
    "L": "l 公升",
    r"\Omega": "Ω Ω",
    r"k\Omega": "kΩ kΩ",
    r"M\Omega": "MΩ MΩ",
    r"m\Omega": "mΩ mΩ",
    "in": "inch inches 英寸",
    "ft": "foot feet 英尺",
    "yd": "yard yards 码",
    "mi": "mile miles 英里",
    "nmi": "海里",
    "t": "ton tons tonne tonnes 吨",
    "jin": "斤",
    "lb": "pound pounds lbs 磅",
    "oz": "ounce ounces 盎司",
    "ha": "hectare hectares 公顷",
    "min": "minute minutes mins 分钟",
    "h": "hour hours hr hrs 小时 个小时 时",
    "d": "day days 天 日",
    "wk": "week weeks wks 周 星期 个星期",
    "mo": "month months 月 个月",
    "yr": "year years yrs 年",
    "atm": "atmosphere atmospheres",
    "bar": "bars",
    "rad": "radian radians 弧度",
    "arcmin": "arcmin arcminutes",
    "arcsec": "arcsec arcseconds",
    "degree": r"degree degrees deg ^\circ ° 度",
    "celsius": r"Celsius celsius ℃ 摄氏度",
    "fahrenheit": r"Fahrenheit fahrenheit ℉ 华氏度",
    "dollar": "dollar dollars USD 美元",
    "cent": "cent cents ¢ 美分",
    "euro": "euro euros EUR 欧元",
    "GBP": "英镑",
    "yen": "yen JPY 日元",
    "yuan": "yuan RMB CNY 元 块钱 人民币",
    "jiao": "jiao 角",
    "fen": "fen 分",
    "won": "KRW 韩元",
    "rupee": "rupees INR ₹",
    "unit": "unit units",
}
_NAMED_BY_THEMSELVES = (
    "in ft yd mi t lb oz min h rad ha mph fps atm bar Wb dB psi GBP wk mo yr rpm ppm dpi kB MB GB TB KB"
).split() + [r"\AA"]
_SIZES: dict[str, tuple[str, int, Fraction]] = {
    "L": ("m", 3, Fraction(1, 1000)),
    "ha": ("m", 2, Fraction(10_000)),
    "in": ("m", 1, Fraction("0.0254")),
    "ft": ("m", 1, Fraction("0.3048")),
    "yd": ("m", 1, Fraction("0.9144")),
    "mi": ("m", 1, Fraction("1609.344")),
    "nmi": ("m", 1, Fraction(1852)),
    "t": ("g", 1, Fraction(10**6)),
    "jin": ("g", 1, Fraction(500)),
    "lb": ("g", 1, Fraction("453.59237")),
    "oz": ("g", 1, Fraction("453.59237") / 16),
    "min": ("s", 1, Fraction(60)),
    "h": ("s", 1, Fraction(3600)),
    "d": ("s", 1, Fraction(86_400)),
    "wk": ("s", 1, Fraction(604_800)),
    "mo": ("yr", 1, Fraction(1, 12)),
    "yr": ("yr", 1, Fraction(1)),
    "Wh": ("J", 1, Fraction(3600)),
    "bar": ("Pa", 1, Fraction(10**5)),
    "atm": ("Pa", 1, Fraction(101_325)),
    "degree": ("degree", 1, Fraction(1)),
    "arcmin": ("degree", 1, Fraction(1, 60)),
    "arcsec": ("degree", 1, Fraction(1, 3600)),
    "dollar": ("dollar", 1, Fraction(1)),
    "cent": ("dollar", 1, Fraction(1, 100)),
    "yuan": ("yuan", 1, Fraction(1)),
    "jiao": ("yuan", 1, Fraction(1, 10)),
    "fen": ("yuan", 1, Fraction(1, 100)),
}
CURRENCIES = frozenset("dollar cent euro GBP yen yuan jiao fen won rupee".split())


def _units() -> tuple[dict[str, str], dict[str, tuple[str, int, Fraction]]]:
    names = {name: name for name in _NAMED_BY_THEMSELVES}
    sizes = dict(_SIZES)
    for unit, (words, chinese, prefixes) in _PREFIXED.items():
        sizes.setdefault(unit, (unit, 1, Fraction(1)))
        base, power, size = sizes[unit]
        names |= _spellings(unit, (unit,), words.split(), chinese.split())
        for prefix in prefixes.split():
            word, exponent, character = _PREFIXES[prefix]
            symbols = [f"{mark}{unit}" for mark in (_MICRO if prefix == "μ" else (prefix,))]
            prefixed = [character + name for name in chinese.split()]
            names |= _spellings(f"{prefix}{unit}", symbols, [word + name for name in words.split()], prefixed)
            sizes[f"{prefix}{unit}"] = (base, power, size * Fraction(10) ** exponent)
    return names | {spelling: unit for unit, all_ in _SPELLED.items() for spelling in all_.split()}, sizes


def _spellings(unit: str, symbols: Iterable[str], words: Iterable[str], chinese: Iterable[str]) -> dict[str, str]:
    in_words = [form for word in words for form in (word, word if word.endswith("z") else f"{word}s")]
    in_words += [word.capitalize() for word in in_words if len(word) > 4]
    return dict.fromkeys((*symbols, *in_words, *chinese), unit)


NAMES, SIZES = _units()
"""NAMES: a unit's canonical spelling by every spelling; SIZES: by canonical spelling its base unit, its power, its size."""


def pattern_of(names: Iterable[str]) -> str:
    """Return a regular expression for any of the names, the longest first; it branches by character, which is quick."""
    tree: dict = {}
    for name in names:
        branch = tree
        for character in name:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _alternatives(tree)


def _alternatives(tree: dict) -> str:
    branches = [re.escape(character) + _alternatives(rest) for character, rest in tree.items() if character]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in tree else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in tree else joined


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
    """Return the canonical spelling of a unit or a counted thing, or None for what is neither."""
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


_COUNTED_WORDS = re.compile(r"[A-Za-z]{2,20}(?:[ -][A-Za-z]{2,20}){0,7}", re.ASCII)


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
"""May be in the singular, as after one and after a fraction."""


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
    if not _COUNTED_WORDS.fullmatch(text):
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
    """Return whether words after a number make it another one, or none: `halves`, `below zero`, `divided by two`, `or 6`."""
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
