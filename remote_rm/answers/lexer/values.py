r"""The types of spans that are values: units, numbers, and notations such as dates, clock readings and ratios.

Units and their names are tables, of which the patterns are made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from remote_rm.answers.lexer import sections

_TABLES = sections("values.ini")
WORDS = {name: tuple(words.split()) for name, words in _TABLES["words"].items()}
_MICRO = ("μ", "µ", r"\mu ")


def _units() -> tuple[dict[str, str], dict[str, tuple[str, int, Fraction]]]:
    names = {name: name for name in WORDS["named_by_themselves"]}
    sizes: dict[str, tuple[str, int, Fraction]] = {}
    others = {unit: row.split("|") for unit, row in _TABLES["others"].items()}
    for unit, (_, *size) in others.items():
        if size:
            number, base, power = (*size[0].replace("^", " ").split(), "1")[:3]
            sizes[unit] = (base, int(power), Fraction(number))
    for unit, row in _TABLES["prefixed"].items():
        words, chinese, prefixes = (part.split() for part in row.split("|"))
        base, dimension, one = sizes.setdefault(unit, (unit, 1, Fraction(1)))
        for prefix in ("", *prefixes):
            word, exponent, character = _TABLES["prefixes"][prefix].split() if prefix else ("", "0", "")
            in_words = [word + name + end for name in words for end in ("", "s"[: name[-1] != "z"])]
            in_words += [name.capitalize() for name in in_words if len(name) > 4]
            in_chinese = [character + name for name in chinese]
            symbols = [mark + unit for mark in (_MICRO if prefix == "μ" else (prefix,))]
            names |= dict.fromkeys((*symbols, *in_words, *in_chinese), prefix + unit)
            sizes[prefix + unit] = (base, dimension, one * Fraction(10) ** int(exponent))
    return (
        names | {spelling: unit for unit, (spellings, *_) in others.items() for spelling in spellings.split()},
        sizes,
    )


NAMES, SIZES = _units()
"""NAMES: a unit's canonical spelling by every spelling; SIZES: by canonical spelling its base unit, its power, its size."""
CURRENCIES = frozenset(WORDS["currencies"])


def pattern_of(names: Iterable[str]) -> str:
    """Return a regular expression for any of the names, the longest first; it branches by character, which is quick."""
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(name[:1], []).append(name[1:])
    branches = [re.escape(first) + pattern_of(rest) for first, rest in tails.items() if first]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in tails else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in tails else joined


WORD_VALUES = {word: value for value, word in enumerate(WORDS["small_numbers"])} | {
    word: 10 * value for value, word in enumerate(WORDS["tens"], start=2)
}
WORD_SCALES = {word: int(size) for word, size in _TABLES["scales of numbers in words"].items()}
PART_WORDS = {word: Fraction(1, int(parts)) for parts, words in _TABLES["parts"].items() for word in words.split()}
"""What one of them is of a whole: `quarters` → 1/4."""
SCALES: dict[str, int | Fraction] = {
    **WORD_SCALES,
    **{word: int(size) for word, size in _TABLES["other scales"].items()},
    **PART_WORDS,
}
NUMBER_WORDS = frozenset((*WORD_VALUES, *filter(str.isascii, SCALES)))
CHINESE_DIGITS = "零一二三四五六七八九"
CHINESE_NUMERAL = rf"负?(?:一?半|百分之[{CHINESE_DIGITS}〇两十百点]+|[{CHINESE_DIGITS}〇两十](?:[{CHINESE_DIGITS}〇两十百千万亿点又]|(?<!\d)分之)*)"
"""A pattern for what may be a number in Chinese characters."""
_POLAR = (*WORDS["yes"], *WORDS["no"])

_NAME = pattern_of(NAMES)
_POWER = r"(?:\^(?:\d|\{-?\d\})|[ ](?:squared|cubed))"
_FACTOR = rf"(?:(?:square|sq\.?|cubic|cu\.?)[ ]|平方|立方)?(?:{_NAME})(?![A-Za-z]){_POWER}?"
_TEMPERATURE = r"(?:\^\\circ[ ]?|degrees?[ ]|deg[ ]?)(?P<scale>[CF]|[Cc]elsius|[Ff]ahrenheit)(?![A-Za-z])"
_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.(?P<places>\d*))?|\.(?P<bare_places>\d+))"
_PART = "|".join(sorted(PART_WORDS, key=len, reverse=True))
_CHINESE_SCALE = "|".join(sorted((word for word in SCALES if not word.isascii()), key=len, reverse=True))
_SUBJECT = r"(?:the |this |it |its )?(?:[a-z]+ ){0,4}?"
_MONTH = r"(?P<month>[A-Z][a-z]{2,8})\.?"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\.?,? )?(?:the |on )?"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?"


class Unit:
    """Units as they are written after a value, and what is counted."""

    PER = re.compile("[ ]?/[ ]?")
    COMMAND = re.compile(r"\\[A-Za-z]+")
    LETTER = re.compile("[A-Za-z]")
    DIGIT_OR_COMMAND = re.compile(r"\d|\\")
    ONE_LETTER = re.compile(r"[A-Za-z](?:\^.*)?")
    END_OF_PHRASE = re.compile(r"(?:\\?\}|[\s$])*(?:[.,;:)]|$)")
    BETWEEN_WORDS = re.compile(r"[\s-]+")

    ONE_FACTOR = re.compile(
        rf"(?P<before>(?:square|sq|cubic|cu)\b\.?[ ]|平方|立方)?(?P<name>{_NAME})(?P<after>{_POWER})?", re.ASCII
    )
    TEMPERATURE_ALONE = re.compile(_TEMPERATURE)
    PHRASE = re.compile(
        rf"(?:{_TEMPERATURE.replace('?P<scale>', '?:')}|{_FACTOR}(?:[ ]?(?:/|per[ ]|每|\\cdot[ ]?)[ ]?{_FACTOR})*)",
        re.ASCII,
    )
    PHRASE_AT_END = re.compile(
        rf"(?P<value>.*[^\s\\A-Za-z^_(\[{{/=+-])(?P<space>[ ]?)(?P<unit>{PHRASE.pattern})", re.ASCII
    )
    AFTER_COMMAND = re.compile(
        rf"(?P<value>.*\\(?:pi|alpha|beta|theta))(?P<space>[ ])(?P<unit>{PHRASE.pattern})", re.ASCII
    )
    ANGLE_OF_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis\}?)\s?\(?[\d.]+$")
    MEASURED = re.compile(
        rf"(?P<unit>{PHRASE.pattern})[ ](?:long|tall|wide|high|deep|old|away|apart|thick|in length)", re.ASCII
    )
    BEHIND = re.compile(
        rf"(?:\$|\\\)|\\\]|\s|\\[ ,;!]|~){{0,4}}(?:\\(?:text|mathrm)\s*\{{\s*|\\?[ ~])?(?P<unit>{PHRASE.pattern})",
        re.ASCII,
    )
    LETTER_IN_PROSE = re.compile(r"\s[msghNJWVL]\s[a-z]{2,}")
    COUNTED_WORDS = re.compile(r"[A-Za-z]{2,20}(?:[ -][A-Za-z]{2,20}){0,7}", re.ASCII)
    ORDINALS = re.compile(
        r"(?:thir|four|fif|six|seven|eigh|nine?|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million|billion)ths?"
    )
    IN_ALL = re.compile(r"(?:^| )in (?:total|all)$")
    CLASSIFIED = re.compile(
        rf"[{WORDS['classifiers'][0]}](?P<thing>[\u4e00-\u9fff]{{0,4}})|[{WORDS['bare_classifiers'][0]}]"
    )


class Number:
    """Numbers with their scales, percent signs and units, in figures and in words."""

    NUMBER_WORDS = re.compile(r"[a-z]+(?:(?:-| and |[ ])[a-z]+){0,8}")
    DIGIT_FRACTION = re.compile(r"(\d{1,20})分之(\d{1,20})", re.ASCII)
    QUANTITY = re.compile(
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
    IN_CHINESE = re.compile(rf"(?P<number>{CHINESE_NUMERAL}|\d+分之\d+)(?P<unit>.*)")
    NUMBER_START = re.compile(
        r"(?:minus|negative|an?|half|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty)\b",
        re.IGNORECASE,
    )
    JOINED = re.compile(r"(?<=[A-Za-z\u4e00-\u9fff.])(?:,? and |, ?| )?(?=\d)")
    WITH_MARK = re.compile(r"(\d+(?:\.\d+)?)('|''|\")", re.ASCII)
    DEGREES_AND_MINUTES = re.compile(r"(\d+)\^\\circ ?(\d+(?:\.\d+)?)'(?: ?(\d+(?:\.\d+)?)(?:''|\"))?", re.ASCII)
    FEET_AND_INCHES = re.compile(r"(\d+)' ?(\d+)(?:\"|'')")


class Form:
    """Notations with a meaning of their own."""

    RATIO_SIGN = re.compile(":|比| to ")
    LEADING_ZERO = re.compile(r"0\d")
    DIGITS = re.compile(r"\d+")
    # What a text in a notation has in it, by the name of its kind: the patterns are tried only then.
    HINTS = {
        "YES_NO": re.compile(rf"^(?:{'|'.join(_POLAR)})", re.IGNORECASE),
        "NO_VALUE": re.compile(r"\b(?:no|none|exist|doesn't|dne|infinite|infinitely|undefined)\b", re.IGNORECASE),
        "DATE": re.compile(r"\d[-/.]\d+[-/.]\d|[月年]|[A-Z][a-z]{2}.*\d|\d [A-Zo]"),
        "CLOCK": re.compile(r"\d:\d\d|\d ?[AaPp]M|clock|\d[点时:]|noon|midday|midnight| in the | at night"),
        "RATIO": re.compile(r"\d(?: ?: ?|比| to )\d"),
        "RANGE": re.compile(r"\d.*(?:-| to | and |至|到)-?\d"),
        "TELEPHONE": re.compile(r"\d[-.) ]\d+[-. ]\d|^\(\d+\)|^\+\d"),
        "BASED": re.compile(r"[0-9A-Fa-f]_"),
        "RESIDUE": re.compile("mod"),
        "CODE": re.compile(r"[A-Za-z][\d_]"),
    }

    PLAIN_DIGITS = re.compile(r"[-+]?[\d.]+", re.ASCII)
    YES_NO = re.compile(
        rf"({'|'.join(sorted(_POLAR, key=len, reverse=True))})(?:$|[,.;:!，。]\s*(?!.*(?:\b(?:yes|no|true|false|or|alternatively)\b|(?<![^\s,;，；、])(?:是|否|对|错)(?![^\s,.;，。；、])|\s['\"]))(.*)$)",
        re.IGNORECASE,
    )
    DENIAL = re.compile(r"\bnot\b|n't\b")
    PHRASES = tuple(
        re.compile(pattern, re.IGNORECASE)
        for pattern in (
            rf"(?:{_SUBJECT}has |there (?:is|are) )?(?:no (?:real )?solutions?|no real roots?|none)[.!]?",
            rf"(?:{_SUBJECT}(?:does not exist|doesn't exist)|dne|does not exist)[.!]?",
            rf"(?:{_SUBJECT}has |there (?:is|are) )?(?:an )?infinite(?:ly many| number of)(?: (?:real )?solutions?)?[.!]?",
            rf"(?:{_SUBJECT}is )?undefined[.!]?",
        )
    )
    DATES = tuple(
        re.compile(pattern, re.ASCII)
        for pattern in (
            r"(?P<year>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<day>\d{1,2})",
            r"(?P<m>\d{1,2})(?P<mark>[-/.])(?P<day>\d{1,2})(?P=mark)(?P<year>\d{4})",
            r"(?P<m>\d{1,2})/(?P<day>\d{1,2})/(?P<short_year>\d\d)",
            r"(?P<year>\d{4}) ?年 ?(?P<m>\d{1,2}) ?月(?: ?(?P<day>\d{1,2}) ?[日号])?",
            r"(?P<m>\d{1,2}) ?月 ?(?P<day>\d{1,2}) ?[日号]",
            rf"{_WEEKDAY}{_MONTH} (?P<day>\d{{1,2}})(?:,? ?(?P<year>\d{{4}}))?",
            rf"{_WEEKDAY}(?P<day>\d{{1,2}}) (?:of )?{_MONTH}(?:,? (?P<year>\d{{4}}))?",
            rf"{_MONTH},? (?P<year>\d{{4}})",
        )
    )
    CLOCK = re.compile(
        r"(?:(?:at|about) )?(?P<h>\d{1,2})(?::(?P<m>[0-5]\d)(?::(?P<s>[0-5]\d))?)?"
        r"(?: ?(?P<half>[AP])M|(?: o'?clock)?(?: in the (?P<part>morning|afternoon|evening)| at (?P<night>night))|(?P<clock> o'?clock))?",
        re.IGNORECASE | re.ASCII,
    )
    CHINESE_CLOCK = re.compile(
        r"(?P<half>凌晨|早上|上午|中午|下午|傍晚|晚上)?(?P<h>\d{1,2})(?:点|时(?=\d)|:(?=\d\d))(?:(?P<m>[0-5]?\d)分?|(?P<exact>整|钟)|(?P<thirty>半))?",
        re.ASCII,
    )
    RANGE = re.compile(
        rf"(?P<opened>(?:from|between) )?(?P<low>(?P<minus>-)?{_NUMBER})(?P<low_unit>%|(?: ?[^\W\d]+\.?))??"
        rf"(?P<joint>-| to | and |至|到)(?P<high>-?{_NUMBER})(?P<unit>[ ]?[^\d\s].*)?",
        re.ASCII,
    )
    RATIO = re.compile(rf"{_NUMBER}(?:(?: ?: ?|比| to ){_NUMBER})+", re.ASCII)
    TELEPHONE = re.compile(
        r"\+?(?:\d{1,3}[ .-]?)?\(\d{2,5}\)[ .-]?\d{2,5}(?:[ .-]\d{2,5})*|\+\d{1,3}(?:[ .-]?\d{2,5}){2,5}|\d+(?:-\d+){2,}|\d{3}\.\d{3}\.\d{4}",
        re.ASCII,
    )
    VERSION = re.compile(r"\d{1,5}(?:\.\d{1,5}){2,4}", re.ASCII)
    CODE = re.compile(r"(?=.*[A-Za-z])(?:[A-Za-z0-9]|_(?:\d+|\{\d+\}))+", re.ASCII)
    LETTER_BEFORE_DIGIT = re.compile(r"[A-Za-z]\d")
    FORMULA = re.compile(r"(?:[A-Z][a-z]?(?:_(?:\d|\{\d+\}))?){2,}", re.ASCII)
    FUNCTION = re.compile(
        r"(?:sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|cis)(?![a-z])",
        re.IGNORECASE,
    )
    BASED = re.compile(r"(-?(?=[A-Fa-f]*\d)[0-9A-Fa-f,]+)_\{?(\d+|[a-z]+)\}?", re.ASCII)
    RESIDUE = re.compile(
        r"(?:[A-Za-z]\\equiv ?)?(-?\d{1,300}) ?(?:\\pmod\{(\d{1,300})\}|\(?mod (\d{1,300})\)?)", re.ASCII
    )
    CHOICES = re.compile(r"(?=[A-J]{2,10}$)A?B?C?D?E?F?G?H?I?J?")
    LISTED_CHOICES = re.compile(r"\(?[A-J]\)?(?:(?:[,;&\s]|and)+\(?[A-J]\)?)+")
    BARE_DIGITS = re.compile(r"-?[0-9A-Fa-f,]+", re.ASCII)
    INTEGER = re.compile(r"-?\d{1,300}", re.ASCII)
