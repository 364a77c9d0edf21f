r"""Is an answer equivalent to a label: read by simple rules where they decide, by math-verify where they do not.

The gold answer says how an answer is read: as a choice, a text, a sequence, a number, or an expression.
"""

import logging
import re
from collections.abc import Callable, Iterable

from remote_rm.extraction import is_prose, sole_value
from remote_rm.normalization import enclosing_delimiters, normalize, split_top_level, to_latex, without_environments
from remote_rm.quantity import ROUNDED_FROM_PLACES, parse_quantity, same_quantity

MAX_ANSWER_CHARS = 1000
"""A longer answer is compared as a string only."""
EXACT_DECIMALS = 12
"""Decimal places to which floating-point values of exact golds are compared."""

Undecided = Callable[[str, str], bool | None]
"""(answer, gold) -> whether they are equal, for what the simple rules leave open."""

_CHOICE = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-Ja-j])(?:\)?$|[).:]\s*.*$)", re.IGNORECASE)
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sinh|cosh|tanh|arcsin|arccos|arctan)(?![A-Za-z]))[A-Za-z]{4,}")
_WORDS_ONLY = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'’-])*[^\W\d_]")
_FUNCTION_NAME = re.compile(r"(?:pi|ln|log|exp|sin|cos|tan)")
_ARITHMETIC = re.compile(r"(?:\d|[-+*/.()\s]|\\times|\\cdot|\\div)+")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?)=([^=<>]+)")
_LIST_WORDS = re.compile(r",?\s+(?:and|or)\s+")


def check_label(label: str) -> None:
    """Raise a ValueError for a label that no answer could be judged by."""
    if not normalize(label):
        raise ValueError(
            f"the gold answer is empty ({label!r}), so no response can be judged; "
            "name the column that holds the answers (OpenRLHF's --data.label_key) or drop such rows"
        )


def quick_match(answer: str, label: str) -> bool | None:
    """Return whether the answer equals the label where simple rules can tell, else None."""
    return _match(answer, label, lambda _answer, _gold: None)


def matches(answer: str, label: str) -> bool:
    """Return whether the answer equals the label; may run for as long as sympy likes."""
    return bool(_match(answer, label, _same_expression))


def _match(answer: str, label: str, undecided: Undecided) -> bool | None:
    check_label(label)
    if len(answer) > MAX_ANSWER_CHARS or len(label) > MAX_ANSWER_CHARS:
        return answer.strip() == label.strip()
    gold = normalize(label)
    if not is_prose(answer) and not _is_text(normalize(answer)):
        return _match_value(normalize(answer), gold, undecided)
    if _match_value(normalize(answer), gold, lambda _answer, _gold: False):
        return True
    return _match_value(normalize(sole_value(answer) or ""), gold, undecided)


def _match_value(answer: str, gold: str, undecided: Undecided) -> bool | None:
    """Compare two normalised texts; None where `undecided` said so."""
    if not answer:
        return False
    if answer.casefold() == gold.casefold() and (answer == gold or _is_text(gold)):
        return True
    gold_choice = _choice(gold) if gold[0].isupper() else None
    if gold_choice is not None:
        return _choice(answer) == gold_choice
    gold_items = _gold_sequence(gold)
    if gold_items is not None:
        return _match_sequence(answer, gold, gold_items, undecided)
    return _match_single(answer, gold, undecided)


def _match_single(answer: str, gold: str, undecided: Undecided) -> bool | None:
    """Compare where the gold is one value, relation or text, and the two differ as strings."""
    if _is_text(gold) or _is_text(answer):
        return False
    gold_assigned, answer_assigned = _ASSIGNMENT.fullmatch(gold), _ASSIGNMENT.fullmatch(answer)
    if gold_assigned and (answer_assigned or "=" not in answer):
        if answer_assigned and answer_assigned[1] != gold_assigned[1]:
            return undecided(answer, gold)
        return _match_value(answer_assigned[2] if answer_assigned else answer, gold_assigned[2], undecided)
    gold_number, answer_number = parse_quantity(gold), parse_quantity(answer)
    if gold_number is not None and answer_number is not None:
        return same_quantity(answer_number, gold=gold_number)
    if gold_number is not None and len(split_top_level(answer)) > 1:
        return False
    if "=" in answer and not _has_relation(gold):
        return _match_value(_last_side(answer), gold, undecided)
    # "17+25" repeats the question "17+25"; a gold number wants the sum worked out.
    if gold_number is not None and _ARITHMETIC.fullmatch(answer):
        return False
    return undecided(answer, gold)


def _match_sequence(answer: str, gold: str, gold_items: list[str], undecided: Undecided) -> bool | None:
    gold_pair, answer_pair = enclosing_delimiters(gold), enclosing_delimiters(answer)
    if not _delimiters_agree(answer_pair, gold_pair=gold_pair, length=len(gold_items)):
        return False
    answer_items = _answer_sequence(_inside(answer, answer_pair), length=len(gold_items))
    if len(answer_items) != len(gold_items):
        return False
    if gold_pair is not None and gold_pair[0] in ("{", r"\{"):
        return _match_unordered(answer_items, gold_items, undecided)
    return _all(
        _match_value(normalize(answer_item), normalize(gold_item), undecided)
        for answer_item, gold_item in zip(answer_items, gold_items, strict=True)
    )


def _match_unordered(answer_items: list[str], gold_items: list[str], undecided: Undecided) -> bool | None:
    remaining = [normalize(item) for item in answer_items]
    verdicts: list[bool | None] = []
    for gold_item in gold_items:
        compared = [_match_value(item, normalize(gold_item), undecided) for item in remaining]
        verdict = True if True in compared else None if None in compared else False
        verdicts.append(verdict)
        if verdict:
            remaining.pop(compared.index(True))
    return _all(verdicts)


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    verdicts = list(verdicts)
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _gold_sequence(gold: str) -> list[str] | None:
    """The elements of a gold sequence, or None for a single value: `1,234` is a number, `1, 234` two."""
    pair = enclosing_delimiters(gold)
    if pair is None and parse_quantity(gold) is not None:
        return None
    inside = _inside(gold, pair)
    items = split_top_level(inside)
    if len(items) == 1 and pair is None:
        spaced = inside.split()
        items = spaced if all(_PLAIN_NUMBER.fullmatch(item) for item in spaced) else items
    is_sequence = len(items) > 1 or (pair is not None and pair[0] in ("[", r"\{"))
    return items if is_sequence and all(items) else None


def _answer_sequence(inside: str, *, length: int) -> list[str]:
    """The elements of an answer that is read as a sequence: by commas, else by words, else by white space."""
    items = split_top_level(_LIST_WORDS.sub(", ", inside))
    spaced = inside.split()
    return spaced if len(items) == 1 and len(spaced) == length else items


def _delimiters_agree(answer_pair: tuple[str, str] | None, *, gold_pair: tuple[str, str] | None, length: int) -> bool:
    if answer_pair == gold_pair:
        return True
    is_half_open = {("[", ")"), ("(", "]")} & {answer_pair, gold_pair}
    if is_half_open:
        return False
    if answer_pair is None or gold_pair is None:
        return True
    # Of two elements, [1, 2] is a closed interval, (1, 2) an open one or a point, {1, 2} a set.
    return length > 2 or {answer_pair[0], gold_pair[0]} == {"{", r"\{"}


def _inside(text: str, pair: tuple[str, str] | None) -> str:
    return text if pair is None else text[len(pair[0]) : -len(pair[1])].strip()


def _choice(text: str) -> str | None:
    """The letter of a multiple-choice answer: `A`, `(a)`, `A. 12 cm`, `Option A`."""
    match = _CHOICE.match(text)
    return match[1].upper() if match else None


def _is_text(text: str) -> bool:
    """Return whether the text is words; sympy would read `north` as a product, equal to `thorn`."""
    if _WORDS_ONLY.fullmatch(text) and not _FUNCTION_NAME.fullmatch(text):
        return True
    return _LONG_WORD.search(without_environments(text)) is not None and parse_quantity(text) is None


def _has_relation(text: str) -> bool:
    return re.search(r"[=<>]|\\(?:le|ge|leq|geq|ne|neq|in)(?![A-Za-z])", text) is not None


def _last_side(text: str) -> str:
    """The value that a chain of equations ends in: `3+4=7` → `7`, `7=x` → `7`."""
    *before, last = text.split("=")
    return before[-1] if re.fullmatch(r"[A-Za-z]", last) else last


def _same_expression(answer: str, gold: str) -> bool:
    """Compare by math-verify, to the gold's own precision."""
    # Both imports pull in sympy (half a second); the server process never needs them.
    from math_verify import LatexExtractionConfig, parse, verify

    # Without time limits of its own, which need the main thread's signals, it warns: the pool keeps the time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parsed(text: str) -> list:
        latex = to_latex(text).replace("%", r"\%")
        return parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    gold_number = parse_quantity(gold)
    is_rounded = gold_number is not None and gold_number.places >= ROUNDED_FROM_PLACES
    gold_parsed = parsed(gold)
    answer_parsed = parsed(answer) if gold_parsed else []
    return verify(
        gold_parsed,
        answer_parsed,
        float_rounding=gold_number.places if is_rounded else EXACT_DECIMALS,
        timeout_seconds=None,
    )
