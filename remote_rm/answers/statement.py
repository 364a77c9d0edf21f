r"""What an answer in words commits itself to: one reading of a sentence, whatever the gold answer is.

`The answer is 42.` → `42`; `It takes 2 minutes.` → `2 minutes`; `3 or maybe 5`, `It can't be 5.` → nothing. What is read
does not depend on the gold answer, so that naming several values pays for none of them.
"""

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from remote_rm.answers import lexicon
from remote_rm.answers.normalization import normalize, without_environments
from remote_rm.answers.notation import Kind, read_notation
from remote_rm.answers.numerals import changes_number, parse_words
from remote_rm.answers.quantity import parse_number_words, parse_quantity
from remote_rm.answers.units import NAMES, canonical_unit, conversion, split_unit, unit_behind

MAX_CHARS = 600
"""How much of a text is read, from its end."""
MAX_PLAIN_CHARS = 100

MATH_SPAN = re.compile(r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+)\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)
NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.,/£€¥])(?:(?:\\?\$|[£€¥])\s?)?-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)[百千万亿]*(?:/\d+|\s?\\?%|\s?[€£¥元](?!\d))?(?![A-Za-z0-9_/€£]|[.,]\d)"
)
_SENTENCE_END = re.compile(
    r"(?:(?<!^[A-Z])(?<![^A-Za-z][A-Z])(?<!\b[ap]\.m)(?<!\b(?:Dr|Mr|Ms|St|No|vs|Jr|Sr))(?<!\b(?:Mrs|etc|Fig|e\.g|i\.e)))(?<=[^\s.])\.{1,2}[*_]{0,2}\s+(?=[A-Z(\"'$\\*\d]|(?:or|maybe)\b)"
    r"|\.\s+(?=(?:Or|It|But|Maybe|Perhaps|Alternatively|Actually|Wait|The|This|So)\b)"
    r"|(?<=[^\s!?])[!?][*_]{0,2}\s+|[。！？]\s*|\n+",
)
_PLAIN_VALUE = re.compile(
    r"[-+]?(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*\d(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*"
)
_CHAIN = re.compile(
    r"(?<![\^_\w\\{.,])\d[\d,]*(?:\.\d+)?\)?(?: ?[A-Za-z]{1,3})?\s*=\s*(\$?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)(?![\w\\^*/+(€£-]|[.,]\d)"
)
_LEADING_VALUE = re.compile(
    r"(\$[^$]{1,200}\$|\\\([^\n]{1,200}?\\\)|-?\d[\d,]*(?:\.\d+)?)" + lexicon.BEHIND_VALUE.pattern
)
_TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]{1,300})\}")
_ROUNDED = re.compile(
    r"(?<=\S),?\s+(?:\((?:that is|i\.e\.|about|approximately|≈|=)[^()]*\)"
    r"|(?:or|which is) (?:about|approximately|roughly) \$?\\?\$?[\d.,]+\\?%?\$?)(?=[.\s*$]*$)"
)
_REMARK = re.compile(
    r"\s\((?!.*\bor\b|alternatively|maybe|perhaps|not\b|wrong)[a-z]{2,}(?: [a-z]+){1,8}\)(?=[.\s$*]*$)"
)
_BOLD_AT_END = re.compile(r"\*\*([^*\n]{1,60})\*\*[.!]?$")
_QUOTED = re.compile(r"[\"“‘「]([^\"“”‘’「」\n]{1,60})[\"”’」][.!]?$")
_IN_FIGURES = re.compile(r"(\S+) \(([A-Za-z][A-Za-z -]*)\)")
_RANGE = re.compile(r"\b(?:from|between)\s+(\S*\d\S*)\s+(?:to|and|until)\s+(\S*\d[^\s.,]*)")
_DATE_BEFORE = re.compile(r"\b(?:in|on|at|by)\s+(?=\d)")
_LISTED_NUMBERS = re.compile(r"\d[\d,.]*(?:(?:,| and|, and) \d[\d,.]*)+$")
_PREPOSITION = re.compile(r"(?:\b(?:of|by|in|on|at|from|to|with|near|behind)\b|\b(?:the|an?)\b)\s+(?:(?:the|an?)\s+)?")
_SUBORDINATE = re.compile(r"\b(?:when|if|where|that|which|who|whose|because|since|while|whether)\b[^,;]*$")
POLAR_START = re.compile(
    r"[\s*\"$~]*(yes|no|true|false|是的?|不是|否|对的?|不对|错误?|正确)[*\"]{0,3}(?:[,.;:!，。；！、]|\s[-–—])",
    re.IGNORECASE,
)
_HAS_SUBJECT = re.compile(r"\**([A-Z][a-z]+)\**\s+(?:wins?|won|ran|got|took|does|did|finishe[sd])\b")
_DISPLAY = re.compile(r"\\\[.{1,1500}?\\\]|\$\$[^$]{1,1500}\$\$|\\begin\{(\w+\*?)\}.{1,1500}?\\end\{\1\}", re.DOTALL)
BULLET = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+(?=\S)")
_BULLETS = re.compile(r"(?:(?:^|\n)[ \t]*(?:[-*•]|\d{1,2}[.)])[ \t]+\S[^\n]*){2,}\s*$")
_GAP = re.compile(rf"({lexicon.LEAD_IN.pattern})[\s*_:：]*\n\s*", re.IGNORECASE)
_ASIDE = re.compile(r",\s[^,]{1,40},\s(?=(?:is|are|was|were|equals?)\b)")
_FULL_WIDTH = {0xFEE0 + ord(sign): sign for sign in string.digits + string.ascii_letters}
_ATTACHED_UNIT = re.compile(r"(?<=\d)(?=(?:[kcdm]?m|[km]?g|m?[Ll]|km/h|m/s|s|h|min|N|J|W|V|A|Hz|Pa)(?![A-Za-z]))")
_SPAN = re.compile(r"(?<![\d.,-])(\d[\d,.]*)\s?[-–~～]\s?(\d[\d,.]*\d|\d)(?![\d-])")
_NUMERALS = re.compile(r"[零一二两三四五六七八九十百千万亿]{2,}(?=[^零一二两三四五六七八九十百千万亿]|$)")
_KINDS_BEHIND = re.compile(r"(?<=[\u4e00-\u9fff])[一二两三四五六七八九十\d]+[种个者]$")
_CHINESE_UNIT = re.compile(r"\s?([\u4e00-\u9fff]{1,4})")
_WORDS_BEHIND = re.compile(r"(?:[ -][A-Za-z]+){0,3}")
_TELLING = (lexicon.DENIED, lexicon.OPEN)
_TAKEN_BACK = re.compile(
    r"(?:but )?(?:it|this|that)\s?(?:is|was|'s)?\s?(?:n['’]t|not)\W*$|(?:no|wrong|not)\W*$", re.IGNORECASE
)
_NO_LATER = re.compile(r"\b(?:no|false)\b(?=\W*$|\s?[,.;!])|否|错误|不对", re.IGNORECASE)
_YES_LATER = re.compile(r"\b(?:yes|true)\b|(?<![^\W\d_])(?:是|对)(?![^\W\d_])", re.IGNORECASE)
_JOINED_BEFORE = re.compile(r"[,，、;；/|&~\\]|和|与|以及|或者?|\b(?:or|and|vs|versus|but)\b")
_POINT = re.compile(r"\([^(),=]{1,20}(?:,[^(),=]{1,20})+\)")
_NAMED_VALUE = re.compile(r"\s*([a-z])\s*=\s*([^\s=]{1,20})\s*")
_SOLUTIONS = re.compile(r"\b(?:solutions?|roots?|zeros?|answers?|values?|factors?|elements?|points?)\b")
_BARE_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ATTACHED_WORD = re.compile(r" ?([A-Za-zμ][a-zμ]*|[\u4e00-\u9fff]{1,3})[A-Za-zμ]*")
_SENTENCE_WITHIN = re.compile(r"[.。!！]\D")
_TAG = re.compile(r"</?(?:answer|think)>")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_CJK = re.compile(r"[\u4e00-\u9fff]")
_NO_NUMBERS = frozenset(("one", "hundred", "thousand", "million"))
_NOT_PROSE = frozenset("sin cos tan cot sec csc log ln exp sqrt pi lim mod max min gcd lcm and or".split())
_NO_UNIT_IN_PROSE = frozenset(("in", "a", "A", "at"))


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a text commits itself to."""

    value: str = ""
    """The one value that it states, as written, with its unit; "" where it states none or several."""
    phrases: tuple[str, ...] = ()
    """The same in words, from the whole clause to its end: what a gold answer in words is compared with."""
    listed: tuple[str, ...] = ()
    """The formulas of the clause, in order; none where it has other numbers, denies something or leaves it open."""


NOTHING = Statement()


@lru_cache(maxsize=4096)
def read(text: str) -> Statement:
    """Return what the text states: its last introduced clause, or else its last sentence."""
    clause = clause_of(text)
    if clause is None:
        return NOTHING
    stated = _of_clause(clause)
    return replace(stated, value=measured(stated.value, clause))


def clause_of(text: str) -> str | None:
    """Return the clause that holds the answer, or None where one sentence introduces or offers another one than the next."""
    current, is_led, is_polar = None, False, False
    sentences = list(_sentences(text))
    for sentence in sentences:
        correction = lexicon.CORRECTED.match(sentence) if current is not None and not is_polar else None
        if correction is not None:
            rest = sentence[correction.end() :]
            current, is_led = _introduced(rest) or rest, True
            continue
        if current is not None and (lexicon.ALTERNATIVE.match(sentence) or _TAKEN_BACK.match(sentence)):
            return None
        introduced = _introduced(sentence)
        if _offers_two(sentence) or _denies_introduction(sentence):
            return None
        if introduced is None:
            is_polar = is_polar or (current is None and POLAR_START.fullmatch(sentence + " -") is not None)
            current = current if is_led or (is_polar and current is not None) else sentence
        elif is_led and current is not None and normalize(introduced) != normalize(current):
            return None
        else:
            current, is_led = introduced, True
    if not is_led and not is_polar and _are_bare(sentences):
        return None
    return None if current is None else _TAG.sub("", current).strip()


@lru_cache(maxsize=4096)
def is_prose(text: str) -> bool:
    """Return whether the text reads as words rather than as a value."""
    if len(_CJK.findall(text)) >= 3 or lexicon.introductions(text) or any(words.search(text) for words in _TELLING):
        return True
    return len(words_of(text)) >= 2 or bool(words_of(text) and lexicon.IS.search(text))


def words_of(text: str) -> list[str]:
    """Return the words in a text; names of functions and environments, `and` and `or` are none."""
    return [word for word in _WORD.findall(without_environments(text)) if word.lower() not in _NOT_PROSE]


def without_remark(text: str) -> str:
    """Return the text without what only comments on it: `6, 8, 10 (in increasing order)`, `1/3, or about 0.33`."""
    return _REMARK.sub("", _ROUNDED.sub("", text))


def unit_in_prose(text: str, position: int) -> str:
    """Return the unit behind a value that ends at `position`, "" where there is none; `in` is no inch there."""
    if chinese := _CHINESE_UNIT.match(text, position):
        longest = (chinese[1][:length] for length in range(len(chinese[1]), 0, -1))
        return next(
            (unit for unit in longest if conversion(canonical_unit(unit) or "", into=canonical_unit(unit) or "")), ""
        )
    unit = unit_behind(text, position)
    return "" if unit in _NO_UNIT_IN_PROSE or not canonical_unit(unit) else unit


def measured(value: str, text: str) -> str:
    """Return a number with the one unit that the text gives it, "" where it gives several; any other value as it is."""
    if not _BARE_NUMBER.fullmatch(value):
        return value
    units = set[str]()
    for place in re.finditer(rf"(?<![\d.,]){re.escape(value)}(?!\d|[.,]\d)", text):
        attached = _ATTACHED_WORD.match(text, place.end())
        words = (attached[0].strip(), attached[1]) if attached else ()
        word = next((word for word in words if word in NAMES and word not in _NO_UNIT_IN_PROSE), "")
        units.add(canonical_unit(unit_in_prose(text, place.end()) or word) or "")
    units.discard("")
    return "" if len(units) > 1 else " ".join((value, *units))


def in_one_line(text: str) -> str:
    """Return the text with displayed formulas, bulleted lists and what an introduction at a line's end introduces in one line."""
    if not re.search(r"\n|\\\[|\$\$", text):
        return text
    text = _DISPLAY.sub(lambda display: " ".join(display[0].split()), text)
    text = _BULLETS.sub(_without_bullets, text)
    return _GAP.sub(lambda gap: f"{gap[1]} ", text)


def _without_bullets(bullets: re.Match[str]) -> str:
    items = [BULLET.sub("", line, count=1).strip(" *.,;") for line in bullets[0].strip().splitlines()]
    return bullets[0] if any(map(is_prose, items)) else "\n" + ", ".join(items)


def is_plain(value: str) -> bool:
    """Return whether it is a number or an expression of numbers, so that a unit may stand behind it."""
    return len(value) <= MAX_PLAIN_CHARS and _PLAIN_VALUE.fullmatch(value) is not None


def span_content(match: re.Match[str]) -> str:
    """Return the formula of a match of `MATH_SPAN`."""
    return next(group for group in match.groups() if group is not None).strip()


def _sentences(text: str) -> Iterable[str]:
    text = text.translate(_FULL_WIDTH)
    text = in_one_line(_TEXT_COMMAND.sub(r"\1", text.strip()[-MAX_CHARS:]))
    return filter(None, (part.strip() for part in _SENTENCE_END.split(text)))


def _are_bare(sentences: Sequence[str]) -> bool:
    """Whether several answers of a few words stand one below the other, without a verb."""
    bare = {normalize(sentence).casefold() for sentence in sentences}
    return (
        len(bare) > 1
        and "answer" not in "".join(bare)
        and all(len(text.split()) <= 3 and not lexicon.IS.search(text) for text in bare)
    )


def _offers_two(sentence: str) -> bool:
    """`The answer is A or the answer is B`."""
    introductions = lexicon.introductions(sentence)
    if len(introductions) < 2:
        return False
    between = sentence[introductions[0].end() : introductions[-1].start()]
    return lexicon.OR.search(between) is not None or re.search(r"[\w$][^\w]+(?:and|but)\s|;", between) is not None


def _denies_introduction(sentence: str) -> bool:
    """`I doubt that the answer is 5`; a part of its own denies something else: `It is not 6, so the answer is 5`."""
    parts = [re.split(r"[,;:，；：]", sentence[: found.start()])[-1] for found in lexicon.introductions(sentence)]
    return any(lexicon.DENIED.search(part) or lexicon.OPEN.search(part) for part in parts)


def _introduced(sentence: str) -> str | None:
    """What the sentence introduces as its answer; `the answer` alone introduces nothing."""
    clauses = [sentence[match.end() :] for match in lexicon.introductions(sentence)]
    return next((clause for clause in reversed(clauses) if clause.strip(" *_:：.。")), None)


def _of_clause(clause: str) -> Statement:
    if clause.rstrip().endswith(("?", "？")):
        return NOTHING
    polar = POLAR_START.match(clause)
    whole = clause.strip(" *_").rstrip(".。!！").strip(" *_")
    if polar is not None and not lexicon.introductions(clause):
        return NOTHING if _says_otherwise(polar[1], clause[polar.end() :]) else Statement(phrases=(polar[1],))
    bold = _BOLD_AT_END.search(clause.strip()) if clause.count("**") == 2 else None
    said = without_remark(lexicon.CONTRAST.sub("", _without_comment(_conclusion(whole.replace("**", "")))))
    if concluded := POLAR_START.match(said):
        return Statement(phrases=(concluded[1],))
    said = _KINDS_BEHIND.sub("", said) if "、" in said else said
    if lexicon.OPEN.search(said):
        return Statement(phrases=(whole,))
    adverbial = lexicon.ADVERBIAL.match(said)
    said = said[adverbial.end() :] if adverbial and is_prose(said[adverbial.end() :]) else said
    if lexicon.DENIED.search(said) or lexicon.OPEN.search(said):
        return Statement(phrases=(whole,))
    spanned = _RANGE.search(said)
    plain = _DATE_BEFORE.sub("", said)
    if written := next(
        filter(_is_typed, [*_ends(said), *(said[verb.end() :].strip() for verb in lexicon.IS.finditer(said))]), ""
    ):
        return Statement(value=written, phrases=(whole, said))
    if spanned is not None and len(NUMBER.findall(said)) == 2:
        return Statement(value=f"{spanned[1]}-{spanned[2]}", phrases=(whole, said, spanned[0]))
    if (
        (listed := _LISTED_NUMBERS.search(plain))
        and not _JOINED_BEFORE.search(plain[: listed.start()])
        and len(NUMBER.findall(plain)) == len(NUMBER.findall(listed[0]))
    ):
        return Statement(value=listed[0], phrases=(whole, said))
    if not is_prose(said):
        value = _DATE_BEFORE.sub("", _without_filling(said))
        if words_of(value):
            in_figures = _IN_FIGURES.fullmatch(value)
            if in_figures is not None and parse_number_words(in_figures[2]) is not None:
                value = in_figures[1]
            is_formula = not MATH_SPAN.search(value) or "=" in MATH_SPAN.sub("", value)
            value = _chained(value) or (value if is_formula else _sole_value(value) or value)
        return Statement(value=value, phrases=(said, value))
    complement = _complement(said)
    if complement is None:
        return Statement(phrases=(whole,))
    spans = {span_content(match) for match in MATH_SPAN.finditer(said)}
    if lexicon.BOUND.search(said) and not any(map(lexicon.BOUND.search, spans)):
        return Statement(phrases=(whole, said, complement))
    value = _value_of(complement) or (_counted(said) if complement != said else "")
    if value and not _value_of(complement):
        # 12 people are waiting: a number of subjects is a value, and what they do is none.
        return Statement(value=value, phrases=(whole,))
    if NUMBER.search(value) or MATH_SPAN.search(value):
        return Statement(value=value, phrases=(said, complement), listed=_listed(said, complement))
    phrases = dict.fromkeys(
        filter(
            None,
            (
                said,
                (
                    bold[1].strip()
                    if bold and bold[1].strip() in complement and not _SENTENCE_WITHIN.search(complement)
                    else ""
                ),
                *_in_words(said, complement),
            ),
        )
    )
    return Statement(value=value, phrases=tuple(phrases), listed=_listed(said, complement))


def _says_otherwise(polar: str, rest: str) -> bool:
    """Whether what follows yes or no says the other one, or leaves it open: `Yes, or no`."""
    opposite = _NO_LATER if lexicon.POLAR.get(polar.casefold().rstrip("的误"), polar == "正确") else _YES_LATER
    return opposite.search(rest) is not None or re.search(r"\b(?:or not|alternatively|wrong)\b", rest) is not None


def _without_filling(text: str) -> str:
    filling = lexicon.FILLING.match(text)
    return (text[filling.end() :] if filling else text).strip()


def _conclusion(clause: str) -> str:
    """The part behind the last `so`: `3 + 4 = 7, so x is 7` → `x is 7`."""
    last = None
    for match in lexicon.CONSEQUENCE.finditer(clause):
        rest = clause[match.end() :]
        if match.start() == 0 or lexicon.IS.search(rest) or "=" in rest or not is_prose(rest) or _sole_value(rest):
            last = match
    return clause if last is None or not clause[last.end() :].strip() else clause[last.end() :]


def _without_comment(clause: str) -> str:
    clause = _ASIDE.sub(" ", clause)
    comment = lexicon.COMMENT.search(clause, 1) if clause else None
    return clause[: comment.start()] if comment else clause


def _complement(said: str) -> str | None:
    """What is said behind the last verb, or of what; None where two verbs say different things of one kind."""
    verbs, end = [], 0
    for verb in lexicon.IS.finditer(said):
        if not _SUBORDINATE.search(said, end, verb.start()):
            verbs.append(verb)
        end = verb.end()
    if not verbs:
        colon = said.rfind(": ")
        return _without_filling(said[colon + 1 :]) if colon > 0 else said
    ends = [verb.start() for verb in verbs[1:]] + [len(said)]
    pieces = [said[: verbs[0].start()], *(said[verb.end() : end] for verb, end in zip(verbs, ends, strict=True))]
    pieces = [_without_filling(piece).strip(" *_,;\"'") for piece in pieces]
    kinds = [kind for kind in map(_kind, pieces) if kind is not None]
    if any(one[0] == other[0] and one[1] != other[1] for one in kinds for other in kinds):
        return None
    complement = next((piece for piece in reversed(pieces) if piece), said)
    subject = re.sub(
        r"^(?:so|thus|hence|therefore|option|choice|statement|point|选项)[\s,]+", "", pieces[-2], flags=re.I
    )
    if lexicon.USED.fullmatch(complement) and _sole_value(subject):
        return subject
    if not subject or subject == "It":
        return complement
    is_name = not is_prose(subject) or re.fullmatch(r"(?:[A-Z][\w.-]+ ?)+", subject) or _sole_value(subject)
    return subject if is_name and lexicon.VERDICT.match(said[verbs[-1].end() :].strip()) else complement


def _kind(piece: str) -> tuple[str, object] | None:
    """What class of short answers a piece opens with, and which one it is; None for anything else."""
    first = re.match(r"[^\s,;，；]+", piece)
    word = first[0].strip("*\"'.()$").casefold() if first else ""
    if word in lexicon.POLAR and len(piece.split()) <= 4:
        return "polar", lexicon.POLAR[word]
    if word in lexicon.SIDES and len(piece.split()) <= 2:
        return "side", word
    if _POINT.fullmatch(piece):
        return "point", tuple(piece.strip("()").replace(" ", "").split(","))
    named = [_NAMED_VALUE.fullmatch(item) for item in piece.split(",")]
    if len(named) > 1 and all(named):
        return "point", tuple(value for _, value in sorted(item.groups() for item in named if item is not None))
    number = parse_quantity(normalize(word)) if re.match(r"-?[\d.]", word) else None
    return None if number is None else ("number", number.value)


def _value_of(complement: str) -> str:
    stated = without_remark(complement).strip(' *_"')
    leading = _LEADING_VALUE.match(stated)
    stated = leading[1] if leading else _DATE_BEFORE.sub("", stated)
    if written := _written_value(stated):
        return written
    plain = normalize(stated)
    bare, unit = split_unit(plain)
    if stated and (not is_prose(stated) or (bare != plain and not is_prose(bare))):
        return stated if unit or bare == plain else bare
    return (
        ""
        if lexicon.OR.search(complement) or stated[:1] in ("[", "(", "{")
        else _chained(complement) or _sole_value(complement)
    )


def _counted(said: str) -> str:
    """The number of things that a sentence opens with, where it has no other: `12 people are waiting`."""
    value = _sole_value(said)
    return value if value and re.match(rf"{re.escape(value)}", said, re.IGNORECASE) else ""


def _written_value(stated: str) -> str:
    """What is one value by its form, whatever words are in it, as a date or an hour: `on December 25, 1997`."""
    if stated and read_notation(normalize(stated)):
        return stated
    return next(
        (end for end in (stated, *_ends(stated)) if end and (_is_typed(end) or parse_quantity(normalize(end)))), ""
    )


def _is_typed(text: str) -> bool:
    """Whether the text is a date, an hour, a range or a telephone number."""
    written = read_notation(normalize(text))
    return written is not None and written.kind in (Kind.DATE, Kind.CLOCK, Kind.RANGE, Kind.TELEPHONE)


def _ends(said: str) -> list[str]:
    """What stands behind each preposition."""
    places = [
        match
        for match in _PREPOSITION.finditer(said)
        if not NUMBER.search(said, 0, match.start()) and not lexicon.CHANGED_BEFORE.search(said[: match.end()])
    ]
    return [said[place.end() :] for place in places]


def _chained(said: str) -> str:
    """The last value of a chain of numbers, with its unit: `3 * 60 * 3 = 540 meters a week` → `540 meters`."""
    chain = next(reversed(list(_CHAIN.finditer(said))), None)
    return (
        "" if chain is None or "=" in said[chain.end() :] else f"{chain[1]} {unit_in_prose(said, chain.end())}".strip()
    )


def _sole_value(text: str) -> str:
    """The one formula or number of a text with the unit behind it, "" where it has none or several."""
    text = _ATTACHED_UNIT.sub(" ", text)
    spans = list(_SPAN.finditer(text))
    if len(spans) == 1 and len(NUMBER.findall(_SPAN.sub("", text))) == 0 and not MATH_SPAN.search(text):
        return f"{spans[0][1]}-{spans[0][2]}"
    found = list(MATH_SPAN.finditer(text)) or list(NUMBER.finditer(text))
    values = {span_content(match) if match.re is MATH_SPAN else match.group() for match in found}
    if not values:
        return "" if re.search(r"\d", text) else _sole_number_in_words(text)
    if len(values) > 1:
        return ""
    value = values.pop()
    if any(
        lexicon.CHANGED_BEFORE.search(text[: m.start()])
        or lexicon.CHANGED_BEHIND.match(text, m.end())
        or text[m.end() :].lstrip().startswith("=")
        for m in found
    ):
        return ""
    behind = [_WORDS_BEHIND.match(text, match.end()) for match in found if match.re is NUMBER]
    if any(words is not None and (changes_number(words[0]) or text[words.end() :][:1] == "/") for words in behind):
        return ""
    units = {unit_in_prose(text, match.end()) for match in found} - {""}
    if not units or not is_plain(value):
        return value
    return f"{value} {units.pop()}" if len(units) == 1 else ""


def _sole_number_in_words(text: str) -> str:
    """The one number in words with the unit behind it: `It is five years.` → `five years`."""
    words = [*_NUMERALS.findall(text), *_numbers_in_words(text)]
    if len(words) != 1:
        return ""
    end = text.find(words[0]) + len(words[0])
    behind = _WORDS_BEHIND.match(text, end)
    if behind is not None and changes_number(behind[0]):
        return ""
    unit = unit_in_prose(text, end)
    return words[0] + unit if _CJK.match(unit) else f"{words[0]} {unit}".strip()


def _numbers_in_words(text: str) -> list[str]:
    """The longest runs of words that are a number: `three eighths of the cake` → `three eighths`."""
    tokens, found, start = _WORD.findall(text), [], 0
    while start < len(tokens):
        lengths = range(min(5, len(tokens) - start), 0, -1)
        runs = (" ".join(tokens[start : start + length]) for length in lengths)
        run = next(
            (run for run in runs if run.lower() not in _NO_NUMBERS and parse_words(run.lower()) is not None), ""
        )
        found += [run] if run else []
        start += max(1, len(run.split()))
    return found


def _in_words(said: str, complement: str) -> Iterable[str]:
    """The complement and its ends, for a gold answer in words."""
    if quoted := _QUOTED.search(said):
        yield quoted[1].strip()
    yield complement
    subject = said[: said.rfind(complement)].split()
    # The triangle is an isosceles triangle.
    for verb in list(lexicon.IS.finditer(said))[-1:]:
        subject = said[: verb.start()].split()
        if subject and complement.lower().endswith(f" {subject[-1].lower()}"):
            yield complement[: -len(subject[-1])].strip()
    if lexicon.OR.search(complement) or POLAR_START.match(complement):
        return
    if re.fullmatch(r"[^,、|/;:$\\\d()]+", complement):
        sides = {
            word for word in re.findall(r"(?<!-)\b[^\W\d_]+\b(?!-)", complement.casefold()) if word in lexicon.SIDES
        }
        if sides:
            yield from sides if len(sides) == 1 else ()
            return
    yield from (complement[match.end() :] for match in _PREPOSITION.finditer(complement))
    if match := _HAS_SUBJECT.match(said):
        yield match[1]


def _formulas(text: str) -> tuple[str, ...]:
    if NUMBER.search(MATH_SPAN.sub(" ", text)):
        return ()
    return tuple(span_content(match) for match in MATH_SPAN.finditer(text))


def _listed(said: str, complement: str) -> tuple[str, ...]:
    """The formulas of the sentence, where they are what is said: in `$2$ and $3$ are red and blue` they are not."""
    is_said = MATH_SPAN.search(complement) or lexicon.VERDICT.match(complement) or _SOLUTIONS.search(complement)
    return _formulas(said) if is_said else ()
