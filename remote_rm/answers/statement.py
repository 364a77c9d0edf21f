r"""What an answer in words commits itself to: one reading of a sentence, whatever the gold answer is.

`The answer is 42.` → `42`; `It takes 2 minutes.` → `2 minutes`; `3 or maybe 5`, `It can't be 5.` → nothing. Since the gold
answer is not looked at, naming several values pays for none of them. `RULES` is the order in which readings are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from remote_rm.answers.lexer import (
    NAMES,
    NO_NUMBERS,
    NO_UNIT_IN_PROSE,
    NOT_PROSE,
    POLAR,
    SIDES,
    Match,
    Token,
    introductions,
    places_of,
    span_content,
    with_half_width,
)
from remote_rm.answers.notation import Kind, read_notation
from remote_rm.answers.quantity import (
    canonical_unit,
    changes_number,
    conversion,
    parse_number_words,
    parse_quantity,
    parse_words,
    split_unit,
    unit_behind,
)
from remote_rm.answers.reading import normalize, without_environments

MAX_CHARS = 600
"""How much of a text is read, from its end."""
MAX_PLAIN_CHARS = 100


class Statement(NamedTuple):
    """What a text commits itself to."""

    value: str = ""
    """The one value that it states, as written, with its unit; "" if it states none or several."""
    phrases: tuple[str, ...] = ()
    """The same in words, from the whole clause to its end: a gold answer in words is compared with these."""
    listed: tuple[str, ...] = ()
    """The formulas of the clause, in order; none if it has other numbers, denies something or leaves it open."""


NOTHING = Statement()


@lru_cache(maxsize=4096)
def read(text: str) -> Statement:
    """Return what the text states: its last introduced clause, or else its last sentence."""
    clause = clause_of(text)
    if clause is None:
        return NOTHING
    parts = Clause(clause)
    stated = next(statement for rule in RULES if (statement := rule(parts)) is not None)
    return stated._replace(value=measured(stated.value, clause))


def clause_of(text: str) -> str | None:
    """Return the clause that holds the answer, or None if one sentence introduces or offers another one than the next."""
    current, is_led, is_polar, is_corrected = None, False, False, False
    text = in_one_line(Token.TEXT_COMMAND.sub(r"\1", with_half_width(text).strip()[-MAX_CHARS:]))
    sentences = [part.strip() for part in Token.SENTENCE_END.split(text) if part.strip()]
    for sentence in sentences:
        correction = Token.CORRECTED.match(sentence) if current is not None and not is_polar else None
        if correction is not None:
            rest = sentence[correction.end() :]
            current, is_led, is_corrected = _introduced(rest) or rest, True, True
            continue
        if current is not None and (Token.ALTERNATIVE.match(sentence) or Token.TAKEN_BACK.match(sentence)):
            return None
        introduced = _introduced(sentence)
        if _takes_back_introduction(sentence):
            return None
        if introduced is None:
            is_polar = is_polar or (current is None and Token.POLAR.fullmatch(sentence + " -") is not None)
            current = current if is_led or (is_polar and current is not None) else sentence
        elif is_led and not is_corrected and current is not None and normalize(introduced) != normalize(current):
            return None
        else:
            current, is_led, is_corrected = introduced, True, False
    if not is_led and not is_polar and _are_bare(sentences):
        return None
    return None if current is None else Token.TAG.sub("", current).strip()


@lru_cache(maxsize=4096)
def is_prose(text: str) -> bool:
    """Return whether the text reads as words rather than as a value."""
    if len(Token.CHINESE.findall(text)) >= 3 or introductions(text):
        return True
    if Token.DENIED.search(text) or Token.LEFT_OPEN.search(text):
        return True
    words = len(words_of(text))
    return words >= 2 or bool(words and Token.VERB.search(text))


def words_of(text: str) -> list[str]:
    """Return the words in a text; names of functions and environments, `and` and `or` are none."""
    return [word for word in Token.WORD.findall(without_environments(text)) if word.lower() not in NOT_PROSE]


def without_remark(text: str) -> str:
    """Return the text without what only comments on it: `6, 8, 10 (in increasing order)`, `1/3, or about 0.33`."""
    return Token.REMARK.sub("", Token.ROUNDED.sub("", text))


def unit_in_prose(text: str, position: int) -> str:
    """Return the unit after a value that ends at `position`, "" if there is none; `in` is no inch there."""
    if chinese := Token.CHINESE_UNIT.match(text, position):
        longest = (chinese[1][:length] for length in range(len(chinese[1]), 0, -1))
        return next(
            (unit for unit in longest if conversion(canonical_unit(unit) or "", into=canonical_unit(unit) or "")), ""
        )
    unit = unit_behind(text, position)
    return "" if unit in NO_UNIT_IN_PROSE or not canonical_unit(unit) else unit


def measured(value: str, text: str) -> str:
    """Return a number with the one unit that the text gives it, "" if it gives several; any other value as it is."""
    if not Token.BARE_NUMBER.fullmatch(value):
        return value
    units = set[str]()
    for end in places_of(value, text):
        attached = Token.ATTACHED_WORD.match(text, end)
        words = (attached[0].strip(), attached[1]) if attached else ()
        word = next((word for word in words if word in NAMES and word not in NO_UNIT_IN_PROSE), "")
        units.add(canonical_unit(unit_in_prose(text, end) or word) or "")
    units.discard("")
    return "" if len(units) > 1 else " ".join((value, *units))


def in_one_line(text: str) -> str:
    """Return the text with displayed formulas, bulleted lists and what an introduction at a line's end introduces in one line."""
    if not Token.SEVERAL_LINES.search(text):
        return text
    text = Token.DISPLAY.sub(lambda display: " ".join(display[0].split()), text)
    if bullets := Token.BULLETS.search(text):
        items = [Token.BULLET.sub("", line, count=1).strip(" *.,;") for line in bullets[0].strip().splitlines()]
        if not any(map(is_prose, items)):
            text = text[: bullets.start()] + "\n" + ", ".join(items)
    return Token.GAP.sub(lambda gap: f"{gap[1]} ", text)


def is_plain(value: str) -> bool:
    """Return whether it is a number or an expression of numbers, so that a unit may follow."""
    return len(value) <= MAX_PLAIN_CHARS and Token.PLAIN_VALUE.fullmatch(value) is not None


# Sentences and their clause


def _are_bare(sentences: Sequence[str]) -> bool:
    """Whether several answers of a few words are one below the other, without a verb."""
    bare = {normalize(sentence).casefold() for sentence in sentences}
    is_short = all(len(text.split()) <= 3 and not Token.VERB.search(text) for text in bare)
    return len(bare) > 1 and is_short and not any("answer" in text for text in bare)


def _takes_back_introduction(sentence: str) -> bool:
    """`The answer is A or the answer is B`, `I doubt that the answer is 5`; not `It is not 6, so the answer is 5`."""
    found = introductions(sentence)
    between = sentence[found[0].end() : found[-1].start()] if len(found) > 1 else ""
    if Token.OR.search(between) or Token.FURTHER.search(between) or (found and Token.HEARSAY.match(sentence)):
        return True
    parts = [Token.PAUSE.split(sentence[: match.start()])[-1] + match[0].strip(" :*_") for match in found]
    return any(Token.DENIED.search(part) or Token.LEFT_OPEN.search(part) for part in parts)


def _introduced(sentence: str) -> str | None:
    """What the sentence introduces as its answer; `the answer` alone introduces nothing."""
    clauses = [sentence[match.end() :] for match in introductions(sentence)]
    return next((clause for clause in reversed(clauses) if clause.strip(" *_:：.。")), None)


@dataclass(frozen=True)
class Clause:
    """A clause and its parts, each found when a rule asks for it."""

    text: str

    @cached_property
    def whole(self) -> str:
        """The clause without emphasis and full stops around it."""
        return self.text.strip(" *_").rstrip(".。!！").strip(" *_")

    @cached_property
    def conclusion(self) -> str:
        """The part after the last `so`, without comments: `3 + 4 = 7, so x is 7, not 8` → `x is 7`."""
        clause, last = self.whole.replace("**", ""), None
        for match in Token.CONSEQUENCE.finditer(clause):
            rest = clause[match.end() :]
            if match.start() == 0 or Token.VERB.search(rest) or "=" in rest or not is_prose(rest) or _sole_value(rest):
                last = match
        said = clause[last.end() :] if last is not None and clause[last.end() :].strip() else clause
        said = Token.ASIDE.sub(" ", said)
        said = Token.CONTRAST.sub("", said)
        comment = Token.COMMENT.search(said, 1) if said else None
        said = without_remark(said[: comment.start()] if comment else said)
        # A list in Chinese may end in the number of things that it names.
        return Token.KINDS_AFTER.sub("", said) if "、" in said else said

    @cached_property
    def said(self) -> str:
        """The same without the time or place that it begins with."""
        adverbial = Token.ADVERBIAL.match(self.conclusion)
        rest = self.conclusion[adverbial.end() :] if adverbial else ""
        return rest if is_prose(rest) else self.conclusion

    @cached_property
    def complement(self) -> str | None:
        """What is said after the last verb, or of what; None if two verbs say different things of one kind."""
        return _complement(self.said)

    @cached_property
    def value(self) -> str:
        """The value of the complement."""
        return _value_of(self.complement or "")

    @cached_property
    def listed(self) -> tuple[str, ...]:
        """The formulas of the clause, if they are what is said: in `$2$ and $3$ are red and blue` they are not."""
        said, complement = self.said, self.complement or ""
        signs = (Token.FORMULA.search(complement), Token.VERDICT.match(complement), Token.SOLUTIONS.search(complement))
        if not any(signs) or Token.NUMBER.search(Token.FORMULA.sub(" ", said)):
            return ()
        return tuple(map(span_content, Token.FORMULA.finditer(said)))

    def stating(self, value: str) -> Statement | None:
        """Return a statement of a value and of the clause in words, None for no value."""
        return Statement(value, (self.whole, self.said)) if value else None


# The rules, in the order of RULES: a statement, or None for the next rule


def _yes_or_no(clause: Clause) -> Statement | None:
    """`Yes, it is.`, `it has none, so no, ...`; what says the other one later, or leaves it open, states nothing."""
    polar = Token.POLAR.match(clause.text)
    if polar is None or introductions(clause.text):
        concluded = Token.POLAR.match(clause.conclusion)
        return Statement(phrases=(concluded[1],)) if concluded else None
    is_yes = POLAR.get(polar[1].casefold().rstrip("的误"), polar[1] == "正确")
    rest = clause.text[polar.end() :]
    is_taken_back = any(sign.search(rest) for sign in (Token.NO if is_yes else Token.YES, Token.OR_NOT, Token.DOUBTED))
    return NOTHING if is_taken_back else Statement(phrases=(polar[1],))


def _denied_or_open(clause: Clause) -> Statement | None:
    """`It is not 5`, `maybe 5`."""
    is_open = any(map(Token.LEFT_OPEN.search, (clause.conclusion, clause.said)))
    is_denied = Token.DENIED.search(clause.said) or Token.DOUBTED.search(clause.whole)
    return Statement(phrases=(clause.whole,)) if is_open or is_denied else None


def _typed_value(clause: Clause) -> Statement | None:
    """A date, an hour, a range or a telephone number after a preposition or a verb: `on December 25, 1997`."""
    said = clause.said
    after_verbs = (said[verb.end() :].strip() for verb in Token.VERB.finditer(said))
    return clause.stating(next(filter(_is_typed, [said, *_ends(said), *after_verbs]), ""))


def _range_in_words(clause: Clause) -> Statement | None:
    """`from 3 to 5`."""
    spanned = Token.RANGE_IN_WORDS.search(clause.said)
    if spanned is None or len(Token.NUMBER.findall(clause.said)) != 2:
        return None
    return Statement(f"{spanned[1]}-{spanned[2]}", (clause.whole, clause.said, spanned[0]))


def _number_list(clause: Clause) -> Statement | None:
    """`They are 2, 3 and 5`, with all numbers of the sentence; `March 15, 2019` is one date."""
    plain = Token.PREPOSITION_OF_TIME.sub("", clause.said)
    listed = Token.NUMBER_LIST.search(plain)
    if listed is None or Token.JOINED_BEFORE.search(plain[: listed.start()]) or Token.BOUND.search(plain):
        return None
    if len(Token.NUMBER.findall(plain)) != len(Token.NUMBER.findall(listed[0])):
        return None
    *before, month = ("", *plain[: listed.start()].split())
    if any(Token.CHANGED_BEFORE.search(" ".join((*words, ""))) for words in (before, (*before, month))):
        return None
    date = f"{month} {listed[0]}"
    return clause.stating(date if _is_typed(date) else listed[0])


def _bare_value(clause: Clause) -> Statement | None:
    """`12 apples`, `x = 5`: no sentence."""
    if is_prose(clause.said):
        return None
    value = Token.PREPOSITION_OF_TIME.sub("", _without_filling(clause.said))
    if words_of(value):
        in_figures = Token.IN_FIGURES.fullmatch(value)
        if in_figures is not None and parse_number_words(in_figures[2]) is not None:
            value = in_figures[1]
        is_formula = not Token.FORMULA.search(value) or "=" in Token.FORMULA.sub("", value)
        value = _chained(value) or (value if is_formula else _sole_value(value) or value)
    return Statement(value, (clause.said, value))


def _beside_conditions(clause: Clause) -> Statement | None:
    """`There are 3 bars below 40`, `it was 8 in 2010`: the one number that is no condition, else the one year."""
    said = clause.said
    conditions = list(Token.CONDITION.finditer(said))
    rest = Token.SUBJECT_NUMBER.sub(r"\1, ", Token.CONDITION.sub(" ", said))
    if not conditions or Token.OR.search(rest) or Token.BOUND.search(rest):
        return None
    value = _sole_value(rest)
    if formula := Token.FORMULA.search(rest):
        value = formula[0] if value == span_content(formula) else ""
    years = {found["year"] for found in conditions} - {None}
    if not value and len(years) == 1 and len(conditions) > 1 and not Token.NUMBER.search(rest):
        value = years.pop()
    return clause.stating(value)


def _bound(clause: Clause) -> Statement | None:
    """`It is at least 5`; an inequality in a formula is a value."""
    spans = (span_content(match) for match in Token.FORMULA.finditer(clause.said))
    if not Token.BOUND.search(clause.said) or any(map(Token.BOUND.search, spans)):
        return None
    return Statement(phrases=(clause.whole, clause.said, clause.complement or ""))


def _emphasized(clause: Clause) -> Statement | None:
    """`The range is 9 - (-3) = **4**.`: the one value in bold, at the end."""
    text = clause.text.strip()
    bold = Token.BOLD_AT_END.search(text) if text.count("**") == 2 else None
    value = _sole_value(bold[1]) if bold and not is_prose(bold[1]) else ""
    if not value or Token.OR.search(text) or Token.BOUND.search(text.replace("*", "")):
        return None
    return clause.stating(value)


def _in_words(clause: Clause) -> Statement:
    """`The curve is an ellipse`."""
    said, complement = clause.said, clause.complement or ""
    bold = Token.BOLD_AT_END.search(clause.text.strip()) if clause.text.count("**") == 2 else None
    emphasized = bold[1].strip() if bold and not Token.SENTENCE_WITHIN.search(complement) else ""
    phrases = [said, emphasized if emphasized in complement else "", *_endings(said, complement)]
    # Of `thirteen by True` and `$2$ and $3$ \\ the empty set`, the words after the values are no second answer.
    values = (clause.value, *clause.listed)
    whole = dict.fromkeys(phrase for phrase in phrases if phrase and all(value in phrase for value in values))
    return Statement(clause.value, tuple(whole), clause.listed)


RULES: tuple[Callable[[Clause], Statement | None], ...] = (
    _yes_or_no,
    _denied_or_open,
    _typed_value,
    _range_in_words,
    _number_list,
    _bare_value,
    _beside_conditions,
    _bound,
    _emphasized,
    _in_words,
)
"""The precedence of readings: the first rule that applies decides, and the last one always does."""


# Parts of sentences


def _without_filling(text: str) -> str:
    filling = Token.FILLING.match(text)
    return (text[filling.end() :] if filling else text).strip()


def _complement(said: str) -> str | None:
    verbs, end = [], 0
    for verb in Token.VERB.finditer(said):
        if not Token.SUBORDINATE.search(said, end, verb.start()):
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
    subject = Token.SUBJECT_LEAD.sub("", pieces[-2])
    if Token.USED.fullmatch(complement) and _sole_value(subject):
        return subject
    if not subject or subject == "It":
        return complement
    is_name = not is_prose(subject) or Token.PROPER_NAME.fullmatch(subject) or _sole_value(subject)
    return subject if is_name and Token.VERDICT.match(said[verbs[-1].end() :].strip()) else complement


def _kind(piece: str) -> tuple[str, object] | None:
    """The class of short answers that a piece begins with, and which one it is; None for anything else."""
    first = Token.FIRST_WORD.match(piece)
    word = first[0].strip("*\"'.()$").casefold() if first else ""
    if word in POLAR and len(piece.split()) <= 4:
        return "polar", POLAR[word]
    if word in SIDES and len(piece.split()) <= 2:
        return "side", word
    if Token.POINT.fullmatch(piece):
        return "point", tuple(piece.strip("()").replace(" ", "").split(","))
    named = [Token.NAMED_VALUE.fullmatch(item) for item in piece.split(",")]
    if len(named) > 1 and all(named):
        return "point", tuple(value for _, value in sorted(item.groups() for item in named if item is not None))
    number = parse_quantity(normalize(word)) if Token.NUMBER_START.match(word) else None
    return None if number is None else ("number", number.value)


def _ends(said: str) -> list[str]:
    """What follows each preposition that has no number before it."""
    return [
        said[match.end() :]
        for match in Token.PREPOSITION.finditer(said)
        if not Token.NUMBER.search(said, 0, match.start()) and not Token.CHANGED_BEFORE.search(said[: match.end()])
    ]


def _endings(said: str, complement: str) -> Iterable[str]:
    """The complement and its ends, for a gold answer in words."""
    if quoted := Token.QUOTED.search(said):
        yield quoted[1].strip()
    yield complement
    # It was Newton who found it.
    yield Token.WHO.split(complement, maxsplit=1)[0]
    # The triangle is an isosceles triangle.
    for verb in list(Token.VERB.finditer(said))[-1:]:
        subject = said[: verb.start()].split()
        if subject and complement.lower().endswith(f" {subject[-1].lower()}"):
            yield complement[: -len(subject[-1])].strip()
    if Token.OR.search(complement) or Token.POLAR.match(complement):
        return
    if Token.WORDS_ONLY.fullmatch(complement):
        sides = {word for word in Token.SIMPLE_WORD.findall(complement.casefold()) if word in SIDES}
        if sides:
            yield from sides if len(sides) == 1 else ()
            return
    yield from (
        complement[match.end() :]
        for match in Token.PREPOSITION.finditer(complement)
        if not Token.CHANGED_BEFORE.search(complement[: match.end()])
    )
    if match := Token.HAS_SUBJECT.match(said):
        yield match[1]


# Values


def _value_of(complement: str) -> str:
    stated = without_remark(complement).strip(' *_"')
    leading = Token.LEADING_VALUE.match(stated)
    stated = leading[1] if leading else Token.PREPOSITION_OF_TIME.sub("", stated)
    # A value by its form, whatever words are in it: `on December 25, 1997`.
    if stated and read_notation(normalize(stated)):
        return stated
    for end in (stated, *_ends(stated)):
        if end and (_is_typed(end) or parse_quantity(normalize(end))):
            return end
    plain = normalize(stated)
    bare, unit = split_unit(plain)
    if stated and (not is_prose(stated) or (bare != plain and not is_prose(bare))):
        return stated if unit or bare == plain else bare
    if Token.OR.search(complement) or stated[:1] in ("[", "(", "{"):
        return ""
    return _chained(complement) or _sole_value(complement)


def _is_typed(text: str) -> bool:
    written = read_notation(normalize(text))
    return written is not None and written.kind in (Kind.DATE, Kind.CLOCK, Kind.RANGE, Kind.TELEPHONE)


def _chained(said: str) -> str:
    """The last value of a chain of numbers, with its unit: `3 * 60 * 3 = 540 meters a week` → `540 meters`."""
    chain = next(reversed(list(Token.CHAIN.finditer(said))), None)
    if chain is None or "=" in said[chain.end() :]:
        return ""
    return f"{chain[1]} {unit_in_prose(said, chain.end())}".strip()


def _sole_value(text: str) -> str:
    """The one formula or number of a text with its unit, "" if it has none or several."""
    text = Token.ATTACHED_UNIT.sub(" ", text)
    ranges = list(Token.NUMBER_RANGE.finditer(text))
    formulas = list(Token.FORMULA.finditer(text))
    if len(ranges) == 1 and not formulas and not Token.NUMBER.search(Token.NUMBER_RANGE.sub("", text)):
        return f"{ranges[0][1]}-{ranges[0][2]}"
    found = formulas or list(Token.NUMBER.finditer(text))
    values = {span_content(match) if formulas else match.group() for match in found}
    if not values:
        return "" if any(map(str.isdecimal, text)) else _sole_number_in_words(text)
    if len(values) > 1 or any(_is_changed(text, match) for match in found):
        return ""
    value = values.pop()
    after = [Token.WORDS_AFTER.match(text, match.end()) for match in found if not formulas]
    if any(
        words is not None and (changes_number(words[0].partition(" with ")[0]) or text[words.end() :][:1] == "/")
        for words in after
    ):
        return ""
    units = {unit_in_prose(text, match.end()) for match in found} - {""}
    if not units or not is_plain(value):
        return value
    return f"{value} {units.pop()}" if len(units) == 1 else ""


def _is_changed(text: str, match: Match) -> bool:
    """Whether the words around a number make it another one, or it is only the left side of an equation."""
    start, end = match.span()
    is_left_side = text[end:].lstrip().startswith("=")
    return bool(is_left_side or Token.CHANGED_BEFORE.search(text[:start]) or Token.CHANGED_AFTER.match(text, end))


def _sole_number_in_words(text: str) -> str:
    """The one number in words with its unit: `It is five years.` → `five years`."""
    words = [*Token.CHINESE_NUMERALS.findall(text), *_numbers_in_words(text)]
    if len(words) != 1:
        return ""
    end = text.find(words[0]) + len(words[0])
    after = Token.WORDS_AFTER.match(text, end)
    if after is not None and changes_number(after[0].partition(" with ")[0]):
        return ""
    unit = unit_in_prose(text, end)
    return words[0] + unit if Token.CHINESE.match(unit) else f"{words[0]} {unit}".strip()


def _numbers_in_words(text: str) -> list[str]:
    """The longest runs of words that are a number: `three eighths of the cake` → `three eighths`."""
    tokens, found, start = Token.WORD.findall(text), [], 0
    while start < len(tokens):
        lengths = range(min(5, len(tokens) - start), 0, -1)
        runs = (" ".join(tokens[start : start + length]) for length in lengths)
        run = next((run for run in runs if run.lower() not in NO_NUMBERS and parse_words(run.lower()) is not None), "")
        found += [run] if run else []
        start += max(1, len(run.split()))
    return found
