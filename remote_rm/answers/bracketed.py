r"""Answers in brackets: intervals (an inequality is one as well, `-2\le x<7` is `[-2,7)`), matrices and vectors.

An interval is read into end points; a matrix (`\begin{pmatrix}1&2\\3&4\end{pmatrix}`, `[[1,2],[3,4]]`) into cells.
"""

import re
from dataclasses import dataclass

from remote_rm.answers.normalization import enclosing_delimiters, split_top_level

_SIGN = re.compile(r"\s*(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>)\s*")
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
    """`("[", ")")` where the left end belongs to it and the right end does not."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A union of intervals, and the variable that an inequality or a membership is about ("" for plain intervals)."""

    spans: tuple[Span, ...]
    variable: str = ""


def parse_region(text: str) -> Region | None:
    """Return the region that a normalised text states, or None where it states none."""
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
    r"""Return what stands behind a leading `x\in`, and the variable; the text and "" where there is none."""
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
    parts = _SIGN.split(text)
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
    """Return the cells of the matrix that a normalised text is, row by row, or None where it is none."""
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
