r"""Is an answer equivalent to a label: read by simple rules and values at points if they decide, else by math-verify.

The gold answer says how an answer is read: as a choice, a text, a sequence, a region, a matrix, a number, or an
expression. `quick_match` and `matches` use the same rules and differ only in what the rules leave open. A label that is cut
off, such as `\frac{1}{`, is not gradable.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations

from remote_rm.answers import choice
from remote_rm.answers.algebra import same_expression
from remote_rm.answers.comparison import Undecided, all_of, any_of, is_choice, match_value, refuse, rounds_to, work_out
from remote_rm.answers.lexer import CURRENCIES, NAMES, POLAR, SIZES, Latex, Token
from remote_rm.answers.notation import Kind, gold_sequence, has_relation, is_text, kind_of
from remote_rm.answers.quantity import parse_quantity, same_quantity, split_unit
from remote_rm.answers.reading import normalize
from remote_rm.answers.statement import clause_of, is_prose, read, without_remark
from remote_rm.answers.wording import is_copied, plain, word_in_english

MAX_CHECKED_CHARS = 1000
"""A longer gold answer is compared as a string only, so that its form does not matter."""


def is_gradable(label: str) -> bool:
    """Return whether the gold answer is whole: every bracket closed, every command with its arguments, nothing cut off.

    Words, names and notations that no parser knows are gradable: an answer is compared with them as text. It takes
    microseconds, so that it can be asked before every reward. An empty label is not gradable.
    """
    text = label.strip()
    return _is_whole(text) if len(text) <= MAX_CHECKED_CHARS else True


@lru_cache(maxsize=16_384)
def _is_whole(text: str) -> bool:
    text = text.strip("$").strip()
    if Latex.AND_MORE.fullmatch(text):
        return True
    if not Latex.MEANING.search(text) or (text.endswith("\\") and not text.endswith("\\\\")):
        return False
    return _brackets_close(text) and _groups_are_whole(text) and not Latex.DANGLING.search(text.rstrip(" .,"))


def _brackets_close(text: str) -> bool:
    is_one_sided = r"\right." in text or r"\left." in text
    if not is_one_sided and text.count(r"\{") != text.count(r"\}"):
        return False
    if len(Latex.LEFT.findall(text)) != len(Latex.RIGHT.findall(text)) or text.count(r"\begin") != text.count(r"\end"):
        return False
    if sorted(Latex.BEGIN.findall(text)) != sorted(Latex.END.findall(text)):
        return False
    # Prose has its own brackets, "1) 5 2) 7" too many closing ones; an opening one that stays open is a cut.
    is_open = sum(map(text.count, "([")) > sum(map(text.count, ")]"))
    return is_one_sided or not is_open or Token.LONG_WORD.search(text) is not None


_FULL_GROUP, _EMPTY_GROUP = "\1", "\2"
"""Placeholders of groups that were already read."""


def _groups_are_whole(text: str) -> bool:
    """Whether every brace closes, and every command has its arguments; groups are replaced from the inside out."""
    text = Latex.ESCAPED.sub("", text)
    while group := Latex.GROUP.search(text):
        if Latex.INCOMPLETE.search(group[1]):
            return False
        mark = _FULL_GROUP if group[1].strip() else _EMPTY_GROUP
        text = text[: group.start()] + mark + text[group.end() :]
    return not set(text) & set("{}") and not Latex.INCOMPLETE.search(text)


def listed_golds(label: str) -> list[str]:
    """Return the golds of a label that is a JSON list, any of which an answer may meet; else the label as it is.

    The entries are texts, numbers, or objects with an `answer`, as in the annotations of VQA.
    """
    try:
        found = json.loads(label) if label.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        return [label]
    entries = [entry.get("answer") if isinstance(entry, dict) else entry for entry in found]
    if not all(isinstance(entry, (str, int, float)) and not isinstance(entry, bool) for entry in entries):
        return [label]
    return [str(entry) for entry in entries]


MAX_ANSWER_CHARS = 1000
"""A longer answer is compared as a string only."""


_SINGLE = frozenset({
    Kind.NUMBER, Kind.QUANTITY, Kind.MONEY, Kind.RANGE, Kind.DATE, Kind.CLOCK, Kind.RATIO, Kind.TELEPHONE, Kind.CODE,
    Kind.RESIDUE, Kind.EXPRESSION, Kind.BASED,
})  # fmt: skip
MAX_WORDS = 8
MAX_SIDES = 10
"""Of an approximation: no working is longer."""
EMPTY_SET = r"\emptyset"
_SINGLE_OR_EQUATION = _SINGLE | {Kind.EQUATION}
_POLAR_WORDS = POLAR | {"不是": False}


EMPTY_LABEL = (
    "the gold answer is empty ({!r}), so no response can be judged; "
    "name the column that holds the answers (OpenRLHF's --data.label_key) or drop such rows"
)


def check_label(label: str) -> None:
    """Raise a ValueError for a label that no answer could be judged by."""
    if not normalize(label.strip()[:MAX_ANSWER_CHARS]):
        raise ValueError(EMPTY_LABEL.format(label[:80]))


def quick_match(answer: str, label: str) -> bool | None:
    """Return whether the answer equals the label if simple rules can decide, else None."""
    return _match(answer, label, work_out)


def matches(answer: str, label: str) -> bool:
    r"""Return whether the answer equals the label; may run for as long as sympy likes.

    A list without brackets and a set have no order, `2, -1` meets `-1, 2`; tuples have one.
    False for every answer if `is_gradable(label)` is False.
    """
    return bool(_match(answer, label, _ask_sympy))


def is_stated(answer: str, label: str) -> bool:
    """Return whether the answer equals the label as it stands, with nothing worked out: `2^4` does not state `16`."""
    is_option = choice.states_option(answer) and not choice.names_letter(label)
    return not is_option and bool(_match(answer, label, refuse))


def _ask_sympy(answer: str, gold: str) -> bool:
    is_equal = work_out(answer, gold)
    return same_expression(answer, gold) if is_equal is None else is_equal


def _match(answer: str, label: str, undecided: Undecided) -> bool | None:
    check_label(label)
    if len(answer) > MAX_ANSWER_CHARS or len(label) > MAX_ANSWER_CHARS:
        return answer.strip() == label.strip() and is_gradable(label)
    if not is_gradable(label):
        return False
    if answer.strip() == label.strip():
        return True
    if any(says(answer) and not says(label) for says in _STATES_NOTHING):
        return False
    label, answer = word_in_english(label), plain(answer.strip()).strip("` ")
    # The name of a point or of a ratio is left out if only one of them has it.
    for named, unnamed in ((Token.POINT_NAME, Token.BARE_POINT), (Token.RATIO_NAME, Token.BARE_RATIO)):
        if unnamed.match(answer) or unnamed.match(label):
            answer, label = named.sub("", answer), named.sub("", label)
    gold = normalize(label)
    if is_choice(gold) and (option := choice.read_label(label)) is not None:
        if choice.matches(answer, label):
            return True
        has_text = option.text and not is_choice(normalize(option.text)) and not choice.names_letter(answer)
        return _match(answer, option.text, undecided) if has_text else False
    if choice.states_option(answer) and not choice.names_letter(label):
        said = choice.stated_text(answer)
        whole = normalize(said)
        return False if _changes(whole, said, kind_of(gold)) else match_value(whole, gold, undecided)
    answer = without_remark(answer)
    # `\text{Area}=12\pi` is `12\pi`, unless the label has a relation, too.
    answer = Token.AT_START.sub("", answer if has_relation(label) else Token.NAME_BEFORE.sub("", answer, count=1))
    whole, kind = normalize(answer), kind_of(gold)
    if r"\approx" in whole[1:] and not is_prose(answer):
        return _match_approximation(whole, gold, undecided)
    offers_another = Token.ENGLISH_OR.search(whole) and not Token.ENGLISH_OR.search(gold)
    if kind in _SINGLE and whole != gold and not is_prose(answer) and not Token.ENGLISH_OR.search(whole):
        # A list, or a set of two or more, is no single value.
        if kind_of(whole) in (Kind.LIST, Kind.SET) and len(gold_sequence(whole) or ()) > 1:
            return False
    if _changes(whole, answer, kind):
        return False
    if kind is Kind.NO_VALUE and Token.DENIED_OUTRIGHT.search(answer):
        return False
    if offers_another and kind in _SINGLE:
        return _alternatives_agree(answer, gold, undecided)
    bare, unit = split_unit(whole)
    if not is_prose(bare if unit else answer) and (unit or not is_text(whole)):
        return match_value(whole, gold, undecided)
    if offers_another and is_text(gold):
        return False
    return _alternatives_agree(answer, gold, undecided) or _match_statement(answer, gold, undecided)


def _match_statement(answer: str, gold: str, undecided: Undecided) -> bool | None:
    """Compare what a sentence states: in words with a gold in words, and its value with any gold."""
    stated, kind = read(answer), kind_of(gold)
    if parse_quantity(gold) is None:
        is_in_words = is_text(gold) or kind in (Kind.LIST, Kind.SET, Kind.YES_NO, Kind.NO_VALUE)
        phrases = stated.phrases if is_in_words else stated.phrases[: 2 if gold == EMPTY_SET else 1]
        if any(match_value(normalize(phrase), gold, refuse) for phrase in phrases):
            return True
    value = normalize(stated.value)
    if not value and (items := gold_sequence(gold)) is not None and len(items) == len(stated.listed):
        # One formula for every element of the gold: with as many values as are asked for, naming several is no hedge.
        value = normalize(", ".join(stated.listed))
    if value != gold and kind in _SINGLE and kind_of(value) is Kind.LIST:
        return False
    return _match_approximation(value, gold, undecided) if r"\approx" in value else match_value(value, gold, undecided)


_STATES_NOTHING: tuple[Callable[[str], object], ...] = (
    Token.OPEN_END.search,
    Token.UNEQUAL.search,
    Token.STANCE.search,
    is_copied,
)
"""An answer of which one is true is wrong, unless it is true of the label, too."""


def _changes(whole: str, answer: str, kind: Kind) -> bool:
    """Whether an answer, unless it is a sentence, is another value than its first one: `5 mod 3`, `12 cm/9 cm`, two lines."""
    polar_words = {_POLAR_WORDS[word] for word in Token.POLAR_WORD.findall(whole.casefold())}
    residue = Token.REDUCED.fullmatch(whole) if kind is Kind.NUMBER else None
    quotient = [parse_quantity(part.strip()) for part in Latex.OVER.split(whole)]
    named, *others = whole.split("/")
    sides = [side.strip() for side in whole.split("=")]
    numbers = [number for number in map(parse_quantity, sides) if number is not None]
    lines = {normalize(line) for line in answer.splitlines() if line.strip(" `")}
    is_single = kind in _SINGLE or kind in (Kind.WORD, Kind.YES_NO)
    is_short = len(answer.split()) <= MAX_WORDS or not is_prose(answer)
    return (
        (kind is Kind.MONEY and len(_currencies(whole, answer)) > 1)
        or (kind is Kind.YES_NO and _is_otherwise_in_chinese(answer))
        or (len(polar_words) > 1 and Token.POLAR_ONLY.fullmatch(whole) is not None)
        or (len(sides) == 2 and all(Token.POLAR.fullmatch(f"{side}.") for side in sides))
        or (kind in _SINGLE_OR_EQUATION and Token.SEVERAL_ANSWERS.search(answer) is not None and is_short)
        or (residue is not None and int(residue[1]) >= int(residue[2]))
        or (len(quotient) == 2 and all(side is not None and (side.unit or side.percent) for side in quotient))
        or ("=" in named and any(map(Latex.NAMED.match, others)))
        or any(not same_quantity(number, gold=numbers[-1]) for number in numbers[:-1])
        or Token.CHANGED_IN_CHINESE.search(whole) is not None
        or (is_single and len(lines) > 1 and not is_prose(answer) and not set(answer) & set("=\\"))
    )


def _currencies(whole: str, answer: str) -> set[str]:
    """The currencies that an answer names; an odd dollar sign is no mark of a formula."""
    names = (NAMES.get(word, word) for word in Token.CURRENCY_NAME.findall(whole))
    found = {SIZES[name][0] if name in SIZES else name for name in names if name in CURRENCIES}
    return found | ({"dollar"} if answer.replace(r"\$", "").count("$") % 2 or r"\$" in answer else set())


def _is_otherwise_in_chinese(answer: str) -> bool:
    """Whether yes and no are in it, both in Chinese or one in English."""
    words, said = (Token.POLAR_IN_ENGLISH, Token.POLAR_IN_CHINESE), clause_of(answer) or answer
    english, chinese = ({_POLAR_WORDS[word.lower()] for word in pattern.findall(said)} for pattern in words)
    return len(chinese) > 1 or bool(english and chinese and not english & chinese)


def _match_approximation(answer: str, gold: str, undecided: Undecided) -> bool | None:
    r"""Compare a chain such as `V=36\pi \approx 113.1`, all of whose sides are equal; decimals may be rounded.

    Its exact sides and its last one may be the gold; a decimal before the last only leads there.
    """
    *exact, about = [side.strip() for side in answer.split(r"\approx")]
    named = (side.strip() for part in exact for side in part.split("="))
    first, *others = [normalize(side) for side in named if not Token.VALUE_NAME.fullmatch(side)] or [normalize(about)]
    about, equal = normalize(about), work_out if undecided is refuse else undecided
    sides = [first, *(side for side in others if not rounds_to(first, side)), about]
    if len(sides) > MAX_SIDES:
        return False
    pairs = list(combinations(sides[:-1] if rounds_to(first, about) else sides, 2))
    is_chain = all_of([match_value(one, other, equal) for pair in pairs for one, other in (pair, pair[::-1])])
    return is_chain and any_of([match_value(side, gold, undecided) for side in sides])


def _alternatives_agree(answer: str, gold: str, undecided: Undecided) -> bool:
    """Whether an answer gives several forms, each of which is the gold: `1/2, or equivalently 0.5`."""
    parts = Token.RESTATED.split(answer)
    if len(parts) < 2:
        return False
    forms = [read(part).value or part for part in parts]
    return all(match_value(normalize(form), gold, lambda *pair: work_out(*pair) or False) for form in forms)


MAX_PROMPT_CHARS = 20_000
"""How much of a prompt is searched, from its end."""
MAX_ATOMS = 100


def is_copy(answer: str, *, of: str, label: str) -> bool:
    """Return whether the prompt has what the answer states, in any order and notation: `1 * \\sin(60°)` is `\\sin 60^\\circ`.

    Of a chain, it is the last side that counts, and the value before an approximation. A number is no copy, nor is an
    answer of the label's own parts, which the question may name.
    """
    if not of:
        return False
    answer = plain(answer)
    stated = normalize((read(answer).value or answer) if is_prose(answer) else answer)
    sides = [stated] if has_relation(label) else [side.split("=")[-1] for side in stated.split(r"\approx")]
    parts = [_atoms(split_unit(side.strip())[0]) for side in sides if parse_quantity(normalize(side)) is None]
    wanted = [sorted(_atoms(side)) for side in (label, label.split("=")[-1])]
    telling = [sorted(part) for part in parts if 1 < len(part) <= MAX_ATOMS and sorted(part) not in wanted]
    text = _atoms(of[-MAX_PROMPT_CHARS:]) if telling else ()
    return any(
        sorted(text[place : place + len(part)]) == part
        for part in telling
        for place in range(len(text) - len(part) + 1)
    )


@lru_cache(maxsize=1024)
def _atoms(text: str) -> tuple[str, ...]:
    """The numbers, letters and functions of a text in one spelling, without signs, brackets, ones and zeros."""
    plain_text = Latex.NEUTRAL.sub(" ", unicodedata.normalize("NFKC", text))
    atoms = (found.lstrip("\\").lower() for found in Latex.ATOM.findall(plain_text))
    return tuple(_SIGNS.get(atom, atom) for atom in atoms)


_SIGNS = {
    "√": "sqrt",
    "π": "pi",
    "∫": "int",
    "∑": "sum",
    "σ": "sum",
    "∏": "prod",
    "lvert": "|",
    "rvert": "|",
    "−": "-",
}
