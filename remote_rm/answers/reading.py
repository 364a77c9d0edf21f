r"""What kind of value a normalised text is by its form, and how intervals, matrices and lists are read.

An interval is read into end points (an inequality is one as well, `-2\le x<7` is `[-2,7)`); a matrix
(`\begin{pmatrix}1&2\\3&4\end{pmatrix}`, `[[1,2],[3,4]]`) into cells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from remote_rm.answers.normalization import enclosing_delimiters, split_top_level, without_environments
from remote_rm.answers.notation import Kind, read_notation
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.units import CURRENCIES, split_unit

_RELATION_SIGN = re.compile(r"\s*(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>)\s*")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|omega|phi)")
_MEMBERSHIP = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])\s*(?=[(\[\\])")
_SET_BUILDER = re.compile(
    r"\\\{(?P<name>[A-Za-z])(?:\\in ?\\mathbb\{R\})?\s*(?:\\mid(?![A-Za-z])|\||:)"
    r"(?P<condition>[^{}]*(?P=name)[^{}]*)\\\}"
)
_UNION = re.compile(r"\\cup(?![A-Za-z])|\s+or\s+")
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|sqrt)(?![A-Za-z]))[A-Za-z]{3,}")
_HOLE = re.compile(r"([A-Za-z])\s*\\ne(?![A-Za-z])\s*([^,;=<>]+)")
_INFINITE = ("-\\infty", "\\infty")
_MATRIX = re.compile(
    r"(?:[A-Za-z]=)?(?:[(\[]\s*)?\\begin\{(?:[pb]?matrix|smallmatrix|array)\}(?P<columns>\{[lcr|@\s]*\})?"
    r"(?P<body>.*)\\end\{(?:[pb]?matrix|smallmatrix|array)\}(?:\s*[)\]])?",
    re.DOTALL,
)

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One interval; its end points are normalised texts."""

    left: str
    right: str
    brackets: tuple[str, str]
    """`("[", ")")` if the left end belongs to it and the right end does not."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A union of intervals, and the variable that an inequality or a membership is about ("" for plain intervals)."""

    spans: tuple[Span, ...]
    variable: str = ""


def parse_region(text: str) -> Region | None:
    """Return the region that a normalised text states, or None if it states none."""
    hole = _HOLE.fullmatch(text)
    if hole is not None:
        ends = (_end(hole[2]), "\\infty")
        left = Span(left="-\\infty", right=ends[0], brackets=("(", ")"))
        return Region(spans=(left, Span(left=ends[0], right=ends[1], brackets=("(", ")"))), variable=hole[1])
    body, variable = without_membership(_without_set_builder(text))
    pieces = [piece.strip() for piece in _UNION.split(body)]
    spans, variables = [], {variable} - {""}
    for piece in pieces:
        membership = without_membership(piece)
        named = _inequality(membership[0]) or (_interval(membership[0]), membership[1])
        if named[0] is None:
            return None
        spans.append(named[0])
        variables |= {named[1]} - {""}
    return Region(spans=tuple(spans), variable=variables.pop() if variables else "") if len(variables) < 2 else None


def is_plain_pair(region: Region) -> bool:
    """Return whether the region may as well be a point or a list of two, such as `(1, 2)` and `[1, 2]`."""
    only = region.spans[0]
    is_finite = not {only.left, only.right} & set(_INFINITE)
    return len(region.spans) == 1 and not region.variable and is_finite and only.brackets in (("(", ")"), ("[", "]"))


def without_membership(text: str) -> tuple[str, str]:
    r"""Return the text after a leading `x\in`, and the variable; the whole text and "" if there is none."""
    match = _MEMBERSHIP.match(text)
    return (text[match.end() :].strip(), match[1]) if match else (text, "")


def _without_set_builder(text: str) -> str:
    match = _SET_BUILDER.fullmatch(text)
    return match["condition"].strip() if match else text


def _interval(text: str) -> Span | None:
    if text == r"\mathbb{R}":
        return Span(left="-\\infty", right="\\infty", brackets=("(", ")"))
    pair = enclosing_delimiters(text)
    if pair is None or pair[0] not in "([" or pair[1] not in ")]":
        return None
    ends = split_top_level(text[1:-1])
    return Span(left=_end(ends[0]), right=_end(ends[1]), brackets=pair) if len(ends) == 2 and all(ends) else None


def _inequality(text: str) -> tuple[Span, str] | None:
    parts = _RELATION_SIGN.split(text)
    if any(set(part) & set("=,;:") or _WORDS.search(part) for part in parts[::2]):
        return None
    if len(parts) == 3:
        left, sign, right = parts
        if _VARIABLE.fullmatch(left) and not _VARIABLE.fullmatch(right):
            return _ray(sign, right), left
        return (_ray(_MIRRORED[sign], left), right) if _VARIABLE.fullmatch(right) and left else None
    if len(parts) != 5 or not _VARIABLE.fullmatch(parts[2]) or not parts[0] or not parts[4]:
        return None
    low, first, variable, second, high = parts
    if {first, second} <= {">", "\\ge"}:
        low, first, second, high = high, _MIRRORED[second], _MIRRORED[first], low
    if not {first, second} <= {"<", "\\le"}:
        return None
    brackets = ("[" if first == "\\le" else "(", "]" if second == "\\le" else ")")
    return Span(left=_end(low), right=_end(high), brackets=brackets), variable


_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def _ray(sign: str, bound: str) -> Span:
    if sign in ("<", "\\le"):
        return Span(left="-\\infty", right=_end(bound), brackets=("(", "]" if sign == "\\le" else ")"))
    return Span(left=_end(bound), right="\\infty", brackets=("[" if sign == "\\ge" else "(", ")"))


def _end(written: str) -> str:
    end = written.strip()
    return "\\infty" if end == "+\\infty" else end


def parse_matrix(text: str) -> Rows | None:
    """Return the cells of the matrix that a normalised text is, row by row, or None if it is none."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return _nested_lists(text)
    if r"\begin" in match["body"]:
        return None
    rows = [row.strip() for row in match["body"].split("\\\\")]
    cells = tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows if row)
    return cells if cells and len({len(row) for row in cells}) == 1 else None


def as_vector(text: str, *, length: int) -> tuple[str, ...] | None:
    """Return the components of a bracketed list of that length, or None."""
    items = _items(text)
    return items if items is not None and len(items) == length else None


_UNIT_VECTOR = re.compile(r"\\(?:hat|vec|mathbf|boldsymbol|overrightarrow|bm)\s*\{?\s*(?:\\[ij]math|([ijk]))\s*\}?|\\hat\s?([ijk])")
_COMPONENTS = re.compile(
    r"(?P<i>[-+]?[^-+ijk=,]*?)i(?P<j>[-+][^-+ijk=,]*?)j(?:(?P<k>[-+][^-+ijk=,]*?)k)?|(?P<i_only>[-+]?[^-+ijk=,]*?)i(?P<k_only>[-+][^-+ijk=,]*?)k"
)


def as_components(text: str) -> str | None:
    r"""Return a sum of unit vectors as a tuple, `3i+4j` → `(3, 4)`; None for any other text, complex numbers included."""
    plain = _UNIT_VECTOR.sub(lambda vector: vector[1] or vector[2] or "", text).replace(" ", "")
    match = _COMPONENTS.fullmatch(plain)
    if match is None or _LONG_WORD.search(plain):
        return None
    if match["i"] is None:
        factors = [match["i_only"], "0", match["k_only"]]
    else:
        factors = [match["i"], match["j"], *([match["k"]] if match["k"] is not None else [])]
    return f"({', '.join(f'{factor}1' if factor in ('', '+', '-') else factor for factor in factors)})"


def _nested_lists(text: str) -> Rows | None:
    outer = _items(text)
    rows = [_items(item) for item in outer or () if item[:1] in ("[", "(")]
    if not outer or len(outer) != len(rows) or len(rows) < 2 or not text.startswith("["):
        return None
    cells = tuple(row for row in rows if row is not None)
    return cells if len(cells) == len(rows) and len({len(row) for row in cells}) == 1 else None


def _items(text: str) -> tuple[str, ...] | None:
    pair = enclosing_delimiters(text)
    return tuple(split_top_level(text[1:-1])) if pair in (("(", ")"), ("[", "]")) else None


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
