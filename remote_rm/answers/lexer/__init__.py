r"""The lexer: all regular expressions of answers/, by the types of the spans that they find.

`Token` has the words of sentences, English and Chinese: those that state, deny, bound and leave open, and options. Values
are in `values`, formulas in `latex`, other languages in `languages`. A new wording is an addition to a row.
"""

from __future__ import annotations

import re
import string
from configparser import RawConfigParser
from functools import lru_cache
from pathlib import Path


def sections(file: str, *, delimiter: str = "=") -> dict[str, dict[str, str]]:
    """Return the sections of a table of this folder, whose lines are a key and a value with a delimiter between them."""
    table = RawConfigParser(delimiters=(delimiter,), comment_prefixes=("#",))
    table.optionxform = str  # type: ignore[assignment, method-assign]
    table.read_string((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {name: dict(table[name]) for name in table.sections()}


Match = re.Match[str]


def _cues() -> dict[str, re.Pattern[str]]:
    """The patterns of english.ini; a part has to stand above what it is a part of."""
    texts: dict[str, str] = {}
    cues = {}
    for name, section in sections("english.ini").items():
        for cue, lines in section.items():
            texts[cue] = _PART.sub(lambda part: texts[part[1]], lines.replace("\n", ""))
            cues[cue] = re.compile(texts[cue], re.IGNORECASE if name == "any case" else 0)
    return cues


_PART = re.compile("«([A-Z_]+)»")
_CUES = _cues()


class Token:
    """The types of spans, each with the pattern that finds it."""

    # Those of english.ini.
    VERB = _CUES["VERB"]
    LEAD_IN = _CUES["LEAD_IN"]
    FILLING = _CUES["FILLING"]
    DENIED = _CUES["DENIED"]
    CONTRAST = _CUES["CONTRAST"]
    LEFT_OPEN = _CUES["LEFT_OPEN"]
    OR = _CUES["OR"]
    BOUND = _CUES["BOUND"]
    CORRECTED = _CUES["CORRECTED"]
    ALTERNATIVE = _CUES["ALTERNATIVE"]
    CONSEQUENCE = _CUES["CONSEQUENCE"]
    COMMENT = _CUES["COMMENT"]
    VERDICT = _CUES["VERDICT"]
    USED = _CUES["USED"]
    IGNORANCE = _CUES["IGNORANCE"]
    ADVERBIAL = _CUES["ADVERBIAL"]
    CHANGED_BEFORE = _CUES["CHANGED_BEFORE"]
    CHANGED_AFTER = _CUES["CHANGED_AFTER"]
    RANGE_IN_WORDS = _CUES["RANGE_IN_WORDS"]
    POLAR = _CUES["POLAR"]
    NO = _CUES["NO"]
    YES = _CUES["YES"]
    LEADING_VALUE = _CUES["LEADING_VALUE"]
    SOLUTIONS = _CUES["SOLUTIONS"]
    SENTENCE_END = _CUES["SENTENCE_END"]
    PREPOSITION = _CUES["PREPOSITION"]
    PREPOSITION_OF_TIME = _CUES["PREPOSITION_OF_TIME"]
    SUBORDINATE = _CUES["SUBORDINATE"]
    JOINED_BEFORE = _CUES["JOINED_BEFORE"]
    HAS_SUBJECT = _CUES["HAS_SUBJECT"]
    TAKEN_BACK = _CUES["TAKEN_BACK"]
    DOUBTED = _CUES["DOUBTED"]
    ROUNDED = _CUES["ROUNDED"]
    REMARK = _CUES["REMARK"]
    ASIDE = _CUES["ASIDE"]
    OPTION = _CUES["OPTION"]
    OPTION_CONCLUDED = _CUES["OPTION_CONCLUDED"]
    OPTION_JOINED = _CUES["OPTION_JOINED"]
    OPTION_AT_ONCE = _CUES["OPTION_AT_ONCE"]
    OPTION_STATED = _CUES["OPTION_STATED"]
    OPTION_LATER = _CUES["OPTION_LATER"]
    OPTION_JUDGED = _CUES["OPTION_JUDGED"]
    OPTION_REASON = _CUES["OPTION_REASON"]
    OPTION_DENIED = _CUES["OPTION_DENIED"]
    OPEN_END = _CUES["OPEN_END"]
    INSTRUCTION = _CUES["INSTRUCTION"]
    SIGN_OFF = _CUES["SIGN_OFF"]
    HEADING = _CUES["HEADING"]
    CONDITION = _CUES["CONDITION"]
    CHINESE_LEAD = _CUES["CHINESE_LEAD"]
    CHINESE_OPTION = _CUES["CHINESE_OPTION"]
    SUBJECT_NUMBER = _CUES["SUBJECT_NUMBER"]
    TITLE = _CUES["TITLE"]
    REASON = _CUES["REASON"]
    VERDICT_ON_OPTION = _CUES["VERDICT_ON_OPTION"]
    OPTION_OPEN = _CUES["OPTION_OPEN"]
    ABOUT_OPTIONS = _CUES["ABOUT_OPTIONS"]
    DENIAL_AS_TEXT = _CUES["DENIAL_AS_TEXT"]
    NAMED_BY_NOUN = _CUES["NAMED_BY_NOUN"]
    VALUE_AFTER_A = _CUES["VALUE_AFTER_A"]
    FURTHER = _CUES["FURTHER"]
    OR_NOT = _CUES["OR_NOT"]
    SUBJECT_LEAD = _CUES["SUBJECT_LEAD"]
    BOTH = _CUES["BOTH"]
    RESTATED = _CUES["RESTATED"]
    SEVERAL_ANSWERS = _CUES["SEVERAL_ANSWERS"]
    POLAR_WORD = _CUES["POLAR_WORD"]
    POLAR_IN_ENGLISH = _CUES["POLAR_IN_ENGLISH"]
    POLAR_IN_CHINESE = _CUES["POLAR_IN_CHINESE"]
    POLAR_ONLY = _CUES["POLAR_ONLY"]
    DENIED_OUTRIGHT = _CUES["DENIED_OUTRIGHT"]
    AT_START = _CUES["AT_START"]
    NAME_BEFORE = _CUES["NAME_BEFORE"]
    # Its one group that is not None is the formula without its signs.
    FORMULA = re.compile(
        r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+)\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL
    )
    # With its currency, scale, denominator and percent sign.
    NUMBER = re.compile(
        r"(?<![A-Za-z0-9_.,/£€¥])(?:(?:\\?\$|[£€¥])\s?)?-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)[百千万亿]*(?:/\d+|\s?\\?%|\s?[€£¥元](?!\d))?(?![A-Za-z0-9_/€£]|[.,]\d)"
    )
    # `3-5`.
    NUMBER_RANGE = re.compile(r"(?<![\d.,-])(\d[\d,.]*)\s?[-–~～]\s?(\d[\d,.]*\d|\d)(?![\d-])")
    # At the end: `2, 3 and 5`.
    NUMBER_LIST = re.compile(r"\d[\d,.]*(?:(?:,| and|, and) \d[\d,.]*)+$")
    # The last two numbers of a chain of equations.
    CHAIN = re.compile(
        r"(?<![\^_\w\\{.,])\d[\d,]*(?:\.\d+)?\)?(?: ?[A-Za-z]{1,4}(?:/[A-Za-z]{1,3})?)?\s*=\s*(\$?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)(?![\w\\^*/+(€£-]|[.,]\d)"
    )
    # A number or an expression of numbers.
    PLAIN_VALUE = re.compile(
        r"[-+]?(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*\d(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*"
    )
    # Only digits.
    BARE_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
    CHINESE_NUMERALS = re.compile(r"[零一二两三四五六七八九十百千万亿]{2,}(?=[^零一二两三四五六七八九十百千万亿]|$)")
    # `(1, 2)`.
    POINT = re.compile(r"\([^(),=]{1,20}(?:,[^(),=]{1,20})+\)")
    # `x = 5`.
    NAMED_VALUE = re.compile(r"\s*([a-z])\s*=\s*([^\s=]{1,20})\s*")
    CHINESE_UNIT = re.compile(r"\s?([\u4e00-\u9fff]{1,4})")
    # Between a number and its unit.
    ATTACHED_UNIT = re.compile(r"(?<=\d)(?=(?:[kcdm]?m|[km]?g|m?[Ll]|km/h|m/s|s|h|min|N|J|W|V|A|Hz|Pa)(?![A-Za-z]))")
    ATTACHED_WORD = re.compile(r" ?([A-Za-zμ][a-zμ]*|[\u4e00-\u9fff]{1,3})[A-Za-zμ]*")
    # Up to three words after a number.
    WORDS_AFTER = re.compile(r"(?:[ -][A-Za-z]+){0,3}")
    # `5 (five)`.
    IN_FIGURES = re.compile(r"(\S+) \(([A-Za-z][A-Za-z -]*)\)")
    QUOTED = re.compile(r"[\"“‘「]([^\"“”‘’「」\n]{1,60})[\"”’」][.!]?$")
    BOLD_AT_END = re.compile(r"\*\*([^*\n]{1,60})\*\*[.!]?$")
    SENTENCE_WITHIN = re.compile(r"[.。!！]\D")
    # How many things a Chinese list has named.
    KINDS_AFTER = re.compile(r"(?<=[\u4e00-\u9fff])[一二两三四五六七八九十\d]+[种个者]$")
    TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]{1,300})\}")
    # A displayed formula.
    DISPLAY = re.compile(
        r"\\\[.{1,1500}?\\\]|\$\$[^$]{1,1500}\$\$|\\begin\{(\w+\*?)\}.{1,1500}?\\end\{\1\}", re.DOTALL
    )
    BULLET = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+(?=\S)")
    # A bulleted list at the end.
    BULLETS = re.compile(r"(?:(?:^|\n)[ \t]*(?:[-*•]|\d{1,2}[.)])[ \t]+\S[^\n]*){2,}\s*$")
    # A line break after an introduction.
    GAP = re.compile(rf"({LEAD_IN.pattern})[\s*_:：]*\n\s*", re.IGNORECASE)
    TAG = re.compile(r"</?(?:answer|think)>")
    WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
    CHINESE = re.compile(r"[\u4e00-\u9fff]")
    # Between a letter and the option's text.
    OPTION_MARK = re.compile(r"\s*[.):,;：、，。]\s*|-(?!>)\s*|\s+(?=[\d\\$(]|-\d)|(?=\([^()]*\)$)")
    # A letter with a mark, anywhere.
    OPTION_MARKED = re.compile(
        r"(?<![A-Za-z_])(?:\((?P<round>[A-J])\)|\[(?P<square>[A-J])\]|(?P<marked>[A-J])[.):]\s?(?=\S))"
    )
    # A line that is an option.
    OPTION_LINE = re.compile(r"\*{0,2}(?:\([A-J]\)|[A-J][.):])\*{0,2}(?:\s.{1,200})?")
    # Says that a value is not equal, without what.
    UNEQUAL = re.compile(r"^[\s$*]*(?:\\n(?:e|eq|ot\s?=)(?![a-z])|≠|!=)|\\not(?![a-z])")
    # A question with a list of what to choose from, at the end.
    ASKED_LIST = re.compile(r"[?？][^\n]{0,40}\n\s*(?:(?:[-*•]|\d{1,2}[.)])\s[^\n]*\s*){2,}$")
    # Parts that are crossed out.
    STRUCK_OUT = re.compile(
        r"~~[^~\n]{1,200}~~|<(del|s|strike)>.{0,200}?</\1>|\\(?:x|b)?(?:cancel|sout|st)\s*\{[^{}]{0,100}\}", re.DOTALL
    )
    # A block of code around the whole text.
    FENCE = re.compile(r"\s*```\w*\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
    # What a value is called.
    VALUE_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?|\([A-Za-z]\))?|[A-Za-z]{2,12}|\\angle ?[A-Z]{1,3}")
    # The name of a point before its coordinates, and of a ratio before its terms: `P(3,-2)`, `S_1:S=7:32`.
    POINT_NAME = re.compile(r"^[\s$]*[A-Z]'?(?:_\{?\w\}?)?\s?(?=(?:\\left)?\((?=[^()]*\d)[^()]*,[^()]*\)[\s$.]*$)")
    RATIO_NAME = re.compile(
        r"^[\s$]*[A-Za-z]\w*(?:_\{?\w+\}?)?\s?:\s?[A-Za-z]\w*(?:_\{?\w+\}?)?\s?=\s?(?=\d+\s?:\s?\d+[\s$.]*$)"
    )
    BARE_POINT = re.compile(r"[\s$]*(?:\\left)?\(")
    BARE_RATIO = re.compile(r"[\s$]*\d+\s?:\s?\d")
    # Joins two boxes to a list.
    BETWEEN_BOXES = re.compile(
        r"(?=[^A-Za-z]*(?:[,;、&]|and|\\q?quad|\\text|和|与))(?:[\s$.,;、&~]|\\[(),;\]\[]|\\q?quad|\\text\s*\{\s*and\s*\}|\band\b|和|与)*"
    )
    # A mark of layout before a text of one line; `- 24` is a negative number and `> 24` an inequality.
    LINE_MARK = re.compile(r"\s*(?:#{1,6}\s+|[*•]\s+|-\s+(?=[^\W\d])|>\s+(?=[^\W\d_]{2}))(?=\S)")
    # `8 (units)` and `8, because 3+5=8`.
    UNIT_REMARK = re.compile(r"^([^()\n]{1,60}?)\s*\(((?:sq\.?|square|cubic|cu\.?)?\s?[A-Za-z]{1,20})\)\W*$")
    # Between a letter and a text that is the option's, whatever it denies or names.
    OPTION_BEFORE_TEXT = re.compile(r"\s*[.):]?\s*")
    # A letter with a mark and a text after it: a further option.
    OPTION_OTHER = re.compile(r"\([A-J]\)\s*[^\s(),;]{2}|(?<![A-Za-z])[A-J][.:]\s?\S")
    OPTIONS_ONLY = re.compile(r"(?:[\W_]|\b(?:or|and|[a-j])\b)*", re.IGNORECASE)
    # Between the parts of a sentence.
    PAUSE = re.compile(r"[,;:，；：]")
    PROPER_NAME = re.compile(r"(?:[A-Z][\w.-]+ ?)+")
    FIRST_WORD = re.compile(r"[^\s,;，；]+")
    SIMPLE_WORD = re.compile(r"(?<!-)\b[^\W\d_]+\b(?!-)")
    WORDS_ONLY = re.compile(r"[^,、|/;:$\\\d()]+")
    NUMBER_START = re.compile(r"-?[\d.]")
    SEVERAL_LINES = re.compile(r"\n|\\\[|\$\$")
    # Tells options apart by their text.
    DECIMAL = re.compile(r"\d+(?:\.\d+)?")
    TELLING_WORD = re.compile(r"[^\W\d_]{2,}|[\u4e00-\u9fff]")
    GOLD_CHOICE = re.compile(r"(?:\([A-J]\)|[A-J](?:$|[).:])).*")
    NAMED_LETTER = re.compile(r"(?!(?i:not|or|and|non|either|neither)\b)[A-Za-z]{3,10} ([A-Z])")
    # What can be no number: of red and blue, `red or blue` names one.
    NAME_ONLY = re.compile(r"[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff -]*")
    SIDE = re.compile(r"^([左右上下前后东南西北])[边面侧方]$")
    ARTICLE = re.compile(r"^(?:a|an|the)\s+(?=[a-z]{3})")
    LONG_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
    ENGLISH_OR = re.compile(r"\bor\b")
    CHANGED_IN_CHINESE = re.compile(r"\d\s*(?:个半|折|半)$")
    REDUCED = re.compile(r"(\d{1,30})\s?(?:\\pmod\{|\(?mod )(\d{1,30})[})]?")
    BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
    SEVERAL_VALUES = re.compile(r"\b(?:or|and)\b|[,;]\s")
    FOREIGN_SENTENCE_END = re.compile(r"(?<=[!?。！？।\n])\s*|(?<=\.)\s+")
    DECIMAL_COMMA = re.compile(r"(?<![\d,.])(\d+),(\d{1,2}|\d{4,})(?![\d,])")
    DECIMAL_COMMA_MEASURED = re.compile(
        r"^(-?\d+),(\d{1,2}|\d{4,})(?=\s?(?:[kcdm]?m|[km]?g|m?[Ll]|km/h|m/s|s|h|min|N|J|W|V|A|Hz|Pa|€|%|\\%)(?:[²³]|\^\d)?$)"
    )
    CURRENCY_NAME = re.compile(r"[A-Za-z]+|[元角分]")
    DIGIT_OR_DOLLAR = re.compile(r"\d|\$")
    LETTER_TERM = re.compile(r"(?<!\\)\b\d*[a-z]\b")
    FOREIGN_DIGIT = re.compile(r"(?![0-9²³¹])\d")


POLAR = {"yes": True, "true": True, "no": False, "false": False, "是": True, "对": True, "否": False, "错": False}
SIDES = frozenset(
    "left right up down top bottom above below north south east west 左 右 上 下 左边 右边 上面 下面".split()
)
NOT_PROSE = frozenset("sin cos tan cot sec csc log ln exp sqrt pi lim mod max min gcd lcm and or".split())
NO_NUMBERS = frozenset(("one", "hundred", "thousand", "million"))
NO_UNIT_IN_PROSE = frozenset(("in", "a", "A", "at"))
_FULL_WIDTH = {0xFEE0 + ord(sign): sign for sign in string.digits + string.ascii_letters}
_INTRODUCING = (
    "answer", "option", "choice", "choose", "chose", "pick", "select", "go with", " be", "####", "答", "选", "【", "corresponds", "matches",
    "it is", "it's", "it’s", "this is", "that is", "that's", "that’s", "this's",
)  # fmt: skip


@lru_cache(maxsize=4096)
def introductions(text: str) -> tuple[re.Match[str], ...]:
    """Return the places at which the text introduces an answer, in order."""
    lowered = text.lower()
    return tuple(Token.LEAD_IN.finditer(text)) if any(words in lowered for words in _INTRODUCING) else ()


def span_content(match: re.Match[str]) -> str:
    """Return the formula of a match of `Token.FORMULA`."""
    return next(group for group in match.groups() if group is not None).strip()


def places_of(number: str, text: str) -> list[int]:
    """Return the ends of a number's places in a text; `5` is not in `15` or `5.2`."""
    return [match.end() for match in re.finditer(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text)]


def with_half_width(text: str) -> str:
    """Return the text with the full-width letters and digits of Chinese keyboards as ASCII."""
    return text.translate(_FULL_WIDTH)
