"""What kind of value a normalised text is, told by its form."""

import re
from functools import lru_cache

from remote_rm.answers.bracketed import is_plain_pair, parse_matrix, parse_region, without_membership
from remote_rm.answers.kinds import Kind
from remote_rm.answers.normalization import enclosing_delimiters, split_top_level, without_environments
from remote_rm.answers.notation import read_notation
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.units import CURRENCIES, split_unit

_LONG_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sinh|cosh|tanh|arcsin|arccos|arctan)(?![A-Za-z]))[A-Za-z]{4,}")
_WORDS_ONLY = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_](?:[^\W\d_]|[\s'’-])*[^\W\d_]")
_GEOMETRIC_NAME = re.compile(
    r"\\(?:angle|triangle|parallel|perp|cong|overrightarrow|widehat|odot)(?![A-Za-z])|\\(?:overline|vec)\{[A-Z]{2}\}"
)
_FUNCTION_NAME = re.compile(r"(?:pi|ln|log|exp|sin|cos|tan)")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
TUPLE_ASSIGNMENT = re.compile(r"\((?:[A-Za-z]|\\[a-z]+)(?:,\s?(?:[A-Za-z]|\\[a-z]+))+\)=(?=[(\\])")
LIST_WORDS = re.compile(r"(?:[,;]\s*|\s+|(?<=[)\]}]))(?:and|or)(?:\s+|(?=[(\[{\\]))")
_SIGN_OF_OPERATION = r"(?:[-+*/]|\\times|\\cdot|\\div)"
_COMPUTATION = re.compile(
    r"(?:\d|[-+*/.()\s]|\\times|\\cdot|\\div)+"
    rf"|(?=.*(?:[\d)}}]\s*{_SIGN_OF_OPERATION}|[-\d)}}]\s*\(|\)\s*\d))(?:\d|[-+*/.(){{}}\s]|\\times|\\cdot|\\div|\\frac)+"
)
# A mixed number written out, 1-\frac{1}{2020}, is worked out as far as it goes.
_MIXED_NUMBER = re.compile(r"-?\d+[-+](?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))", re.ASCII)
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|leq|geq|ne|neq|in)(?![A-Za-z])")
_SETS = (r"\{", "{")


@lru_cache(maxsize=4096)
def kind_of(text: str) -> Kind:
    """Return the kind of value that a normalised text is."""
    number = parse_quantity(text)
    if number is not None and not number.unit and not number.percent:
        return Kind.NUMBER
    written = read_notation(text)
    if written is not None:
        return written.kind
    if number is not None:
        return Kind.MONEY if number.unit in CURRENCIES else Kind.QUANTITY
    if parse_matrix(text) is not None:
        return Kind.MATRIX
    region = parse_region(text)
    if region is not None and not is_plain_pair(region):
        return Kind.INTERVAL
    text = without_membership(text)[0]
    if gold_sequence(text) is not None:
        pair = enclosing_delimiters(text)
        return Kind.LIST if pair is None else Kind.SET if pair[0] in _SETS else Kind.TUPLE
    return _kind_of_one(text)


def _kind_of_one(text: str) -> Kind:
    unit = split_unit(text)[1]
    if unit:
        return Kind.MONEY if unit in CURRENCIES else Kind.QUANTITY
    if is_text(text):
        return Kind.WORD
    if has_relation(text):
        return Kind.EQUATION
    mixed = _MIXED_NUMBER.fullmatch(text)
    is_worked_out = mixed is not None and int(mixed[1] or mixed[3]) < int(mixed[2] or mixed[4])
    return Kind.COMPUTATION if _COMPUTATION.fullmatch(text) and not is_worked_out else Kind.EXPRESSION


def is_text(text: str) -> bool:
    """Return whether the text is words; sympy would read `north` as a product, equal to `thorn`."""
    if _WORDS_ONLY.fullmatch(text) and not _FUNCTION_NAME.fullmatch(text):
        return True
    if _GEOMETRIC_NAME.search(text) and "=" not in text:
        return True
    return _LONG_WORD.search(without_environments(text)) is not None and parse_quantity(text) is None


def has_relation(text: str) -> bool:
    """Return whether the text is an equation, an inequality or a membership."""
    return _RELATION.search(text) is not None


def elements(inside: str, *, length: int | None = None) -> list[str]:
    """Return the elements of a list without its brackets: between commas, semicolons, `and` and `or`, else between spaces.

    Spaces separate numbers, or whatever is `length` pieces: `9 100` is a number with its thousands apart.
    """
    items, spaced = split_top_level(LIST_WORDS.sub(", ", inside)), inside.split()
    if len(items) != 1 or len(spaced) < 2:
        return items
    if length is None:
        return spaced if all(_PLAIN_NUMBER.fullmatch(item) for item in spaced) else items
    return spaced if len(spaced) == length and r"\pm" not in inside and parse_quantity(inside) is None else items


def gold_sequence(gold: str) -> list[str] | None:
    """Return the elements of a gold sequence, or None for a single value: `1,234` is a number, `1, 234` two."""
    gold = TUPLE_ASSIGNMENT.sub("", gold)
    pair = enclosing_delimiters(gold)
    if pair is None and (parse_quantity(gold) is not None or read_notation(gold) is not None):
        return None
    items = elements(inside_of(gold, pair))
    if all(items) and (len(items) > 1 or pair is None):
        items = [signed for item in items for signed in both_signs(item)]
    is_sequence = len(items) > 1 or (pair is not None and pair[0] in ("[", r"\{"))
    return items if is_sequence and all(items) else None


def both_signs(item: str) -> list[str]:
    r"""The two values of an item with one `\pm`: `1\pm i` → `1+i`, `1-i`."""
    if item.count(r"\pm") != 1 or is_text(item):
        return [item]
    return [re.sub(r"\\pm ?", sign, item) for sign in ("+", "-")]


def inside_of(text: str, pair: tuple[str, str] | None) -> str:
    return text if pair is None else text[len(pair[0]) : -len(pair[1])].strip()
