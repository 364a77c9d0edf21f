"""The canonical form of an answer, and its parts: intervals, matrices and vectors."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from remote_rm.answers.lexer import Latex, Match, respelled

_COMMANDS = (
    "× times ÷ div · cdot π pi ∞ infty ≤ le ≥ ge ≠ ne ± pm ∪ cup ⌊ lfloor ⌋ rfloor ⌈ lceil ⌉ rceil ∅ emptyset √ sqrt "
    "θ theta α alpha β beta ∈ in ≈ approx ∠ angle △ triangle ⟨ langle ⟩ rangle"
).split()
_FRACTIONS = zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "12 13 23 14 34 15 25 35 45 16 56 18 38 58 78".split(), strict=True)
_UNICODE_TO_LATEX = str.maketrans(
    dict(zip("−–∶′″“”’、\u3000", '--:\'"""\', ', strict=True))
    | {sign: rf"\{command} " for sign, command in zip(_COMMANDS[::2], _COMMANDS[1::2], strict=True)}
    | {sign: rf"\frac{{{parts[0]}}}{{{parts[1]}}}" for sign, parts in _FRACTIONS}
    | {
        "∛": r"\sqrt[3]",
        "∜": r"\sqrt[4]",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "˚": r"^\circ ",
        "或": " or ",
        "和": " and ",
    }
    # The full-width forms of Chinese and Japanese keyboards.
    | {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}
)
_RAISED_DIGITS = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789")
_LOWERED_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CURRENCIES = {"€": "euros", "£": "GBP", "¥": "yen", "￥": "yuan", "₹": "rupees"}
_UNITS_OVER = frozenset("s m h min cm mm km kg g L mL mol K N J C A V W d".split())
MAX_NESTED_COMMANDS = 20
"""How many \\text{...} inside one another are unwrapped."""
MAX_CACHED_CHARS = 200
"""Longer texts are not kept, so that the cache stays within a few MiB."""
_DELIMITERS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}


def normalize(text: str) -> str:
    """Return the canonical form of an answer or a label; the empty string if nothing is left."""
    return _normalized(text) if len(text) <= MAX_CACHED_CHARS else _normalized.__wrapped__(text)


# The samples of one prompt share their label and mostly their answer.
@lru_cache(maxsize=8192)
def _normalized(text: str) -> str:
    text = Latex.RAISED.sub(lambda match: "^{" + match[0].translate(_RAISED_DIGITS) + "}", text)
    text = Latex.LOWERED.sub(lambda match: "_{" + match[0].translate(_LOWERED_DIGITS) + "}", text)
    text = respelled(text, "first")
    if r"\ce" in text:
        text = Latex.CHEMISTRY.sub(_as_formula, text)
    if r"\begin{" in text:
        text = Latex.CASES.sub(
            lambda cases: ", ".join(row.strip(" ,") for row in cases[1].split(r"\\") if row.strip(" ,")), text
        )
    if "$" in text:
        text = Latex.DOLLARS.sub(r"\1\2 dollars", Latex.ESCAPED_DOLLARS.sub(r"\1 dollars", text))
    if Latex.CURRENCY_SIGN.search(text):
        text = Latex.CURRENCY_BEFORE.sub(lambda match: f"{match[1]}{match[3]} {_CURRENCIES[match[2]]}", text)
        text = Latex.CURRENCY_BEHIND.sub(lambda match: f" {_CURRENCIES[match[1]]}", text)
        text = Latex.CURRENCY_SIGN.sub("", text)
    text = Latex.NUMBER_TO_NUMBER.sub("-", text)
    text = respelled(text.translate(_UNICODE_TO_LATEX), "layout")
    if "^{-" in text:
        text = Latex.INVERSE_UNIT.sub(_over_unit, text)
    for _ in range(MAX_NESTED_COMMANDS):
        text, count = Latex.TEXT_COMMANDS.subn(r"\1", text)
        if not count:
            break
    text = " ".join(text.split())
    if "^{-" in text:
        text = Latex.INVERSE_UNIT.sub(_over_unit, text)
    return _strip_wrapping(respelled(" ".join(respelled(text, "canonical").split()), "spaces"))


def _as_formula(chemistry: Match) -> str:
    r"""A formula of mhchem in LaTeX: `\ce{SO4^2-}` → `SO_4^{2-}`, `\ce{Na+}` → `Na^+`."""
    formula, charge = chemistry[1], ""
    if found := Latex.CHARGE.search(formula):
        formula, charge = formula[: found.start()], f"^{{{found[1] or found[2]}}}"
    return Latex.ATOM_COUNT.sub(r"_{\1}", formula) + charge


def _over_unit(unit: Match) -> str:
    """`s^{-2}` after another unit as `/s^2`."""
    if unit[1] not in _UNITS_OVER:
        return unit[0]
    return f"/{unit[1]}" + ("" if unit[2] == "1" else f"^{unit[2]}")


def to_latex(text: str) -> str:
    r"""Return normalised plain-text mathematics as LaTeX: `sqrt(2)*x**10` → `\sqrt{2}\cdot x^{10}`."""
    return respelled(text, "to latex").strip()


def without_environments(text: str) -> str:
    r"""Return the text without `\begin{...}`, `\end{...}` and `\operatorname{...}`, whose names are no words."""
    return Latex.ENVIRONMENT.sub(" ", text)


def enclosing_delimiters(text: str) -> tuple[str, str] | None:
    r"""Return the pair of delimiters around the whole text, e.g. ("[", ")"), or None: `(1, 2)\cup(3, 4)` has none."""
    opening = next((mark for mark in (r"\{", "(", "[", "{") if text.startswith(mark)), None)
    if opening is None or len(text) < 2:
        return None
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    if closing not in _DELIMITERS.values():
        return None
    depths = _depths(text)
    return (opening, closing) if depths[-1] == 0 and min(depths[len(opening) - 1 : -1]) > 0 else None


def split_top_level(text: str) -> list[str]:
    """Return the parts between the commas and semicolons outside all brackets; one part if there are none."""
    depths = _depths(text)
    cuts = [index for index, character in enumerate(text) if character in ",;" and depths[index] == 0]
    starts, ends = [0, *(cut + 1 for cut in cuts)], [*cuts, len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def closing_brace(text: str, *, start: int, longest: int | None = None) -> int | None:
    """Return where the brace ends that was opened before `start`; None if it does not, or is longer."""
    depth = 1
    for index in range(start, len(text) if longest is None else min(start + longest, len(text))):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


def _depths(text: str) -> list[int]:
    """The bracket depth after each character."""
    depths, depth = [], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        depths.append(depth)
    return depths


def _strip_wrapping(text: str) -> str:
    """Without Markdown emphasis, quotes, closing full stops, and brackets or braces around a single value.

    Quotes after a number are feet, inches or derivatives: `5'10"`, `y'`.
    """
    while True:
        shorter = Latex.AROUND_VALUE.sub(lambda match: match[0][0] if match[0][0] == "-" else "", text.strip(" *`"))
        if len(shorter) > 1 and shorter[0] in "\"'" and shorter[-1] == shorter[0]:
            shorter = shorter[1:-1].strip()
        shorter = shorter.rstrip(".,;?:。")
        pair = enclosing_delimiters(shorter)
        if pair in (("(", ")"), ("{", "}")) and len(split_top_level(shorter[1:-1])) == 1:
            shorter = shorter[1:-1]
        if shorter == text:
            return text
        text = shorter


_MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_INFINITE = (r"-\infty", r"\infty")
_OPEN = ("(", ")")

Rows = tuple[tuple[str, ...], ...]


class Span(NamedTuple):
    """One interval; its end points are normalised texts."""

    left: str
    right: str
    brackets: tuple[str, str]
    """`("[", ")")` if the left end belongs to it and the right end does not."""


class Region(NamedTuple):
    """A union of intervals, and the variable that an inequality or a membership is about ("" for plain intervals)."""

    spans: tuple[Span, ...]
    variable: str = ""


def parse_region(text: str) -> Region | None:
    """Return the region that a normalised text states, or None if it states none."""
    if hole := Latex.HOLE.fullmatch(text):
        end = _end(hole[2])
        return Region((Span(_INFINITE[0], end, _OPEN), Span(end, _INFINITE[1], _OPEN)), hole[1])
    builder = Latex.SET_BUILDER.fullmatch(text)
    body, variable = without_membership(builder["condition"].strip() if builder else text)
    spans, variables = [], {variable}
    for piece in Latex.UNION.split(body):
        inside, member = without_membership(piece.strip())
        span, name = _inequality(inside) or (_interval(inside), member)
        if span is None:
            return None
        spans.append(span)
        variables.add(name)
    variables.discard("")
    return Region(tuple(spans), variables.pop() if variables else "") if len(variables) < 2 else None


def is_plain_pair(region: Region) -> bool:
    """Return whether the region may as well be a point or a list of two, such as `(1, 2)` and `[1, 2]`."""
    only = region.spans[0]
    is_finite = not {only.left, only.right} & set(_INFINITE)
    return len(region.spans) == 1 and not region.variable and is_finite and only.brackets in (_OPEN, ("[", "]"))


def without_membership(text: str) -> tuple[str, str]:
    r"""Return the text after a leading `x\in`, and the variable; the whole text and "" if there is none."""
    match = Latex.MEMBERSHIP.match(text)
    return (text[match.end() :].strip(), match[1]) if match else (text, "")


def _interval(text: str) -> Span | None:
    if text == r"\mathbb{R}":
        return Span(*_INFINITE, _OPEN)
    pair = enclosing_delimiters(text)
    if pair is None or pair[0] not in "([" or pair[1] not in ")]":
        return None
    ends = split_top_level(text[1:-1])
    return Span(_end(ends[0]), _end(ends[1]), pair) if len(ends) == 2 and all(ends) else None


def _inequality(text: str) -> tuple[Span, str] | None:
    parts = Latex.RELATION_SIGN.split(text)
    if any(set(part) & set("=,;:") or Latex.WORDS.search(part) for part in parts[::2]):
        return None
    # `a <` is a region whose end no number meets.
    if not parts[0] or (not parts[-1] and len(parts) != 3):
        return None
    if len(parts) == 3:
        left, sign, right = parts
        if not Latex.VARIABLE.fullmatch(left) or Latex.VARIABLE.fullmatch(right):
            left, sign, right = right, _MIRRORED[sign], left
        is_below = sign in ("<", r"\le")
        parts = [_INFINITE[0], "<", left, sign, right] if is_below else [_INFINITE[1], ">", left, sign, right]
    if len(parts) != 5 or not Latex.VARIABLE.fullmatch(parts[2]):
        return None
    low, first, variable, second, high = parts
    if {first, second} <= {">", r"\ge"}:
        low, first, second, high = high, _MIRRORED[second], _MIRRORED[first], low
    if not {first, second} <= {"<", r"\le"}:
        return None
    brackets = ("[" if first == r"\le" else "(", "]" if second == r"\le" else ")")
    return Span(_end(low), _end(high), brackets), variable


def _end(written: str) -> str:
    end = written.strip()
    return _INFINITE[1] if end == r"+\infty" else end


def parse_matrix(text: str) -> Rows | None:
    """Return the cells of the matrix that a normalised text is, row by row, or None if it is none."""
    match = Latex.MATRIX.fullmatch(text)
    if match is None:
        items = (bracketed(text) if text.startswith("[") else None) or ()
        lists = tuple(row for row in map(bracketed, items) if row is not None)
        return lists if 1 < len(lists) == len(items) and len(set(map(len, lists))) == 1 else None
    if r"\begin" in match["body"]:
        return None
    rows = [row.strip() for row in match["body"].split("\\\\")]
    cells = tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows if row)
    return cells if cells and len({len(row) for row in cells}) == 1 else None


def as_components(text: str) -> str | None:
    r"""Return a sum of unit vectors as a tuple, `3i+4j` → `(3, 4)`; None for any other text, complex numbers included."""
    plain = Latex.UNIT_VECTOR.sub(lambda vector: vector[1] or vector[2] or "", text).replace(" ", "")
    match = Latex.COMPONENTS.fullmatch(plain)
    if match is None or Latex.LONG_WORD.search(plain):
        return None
    if match["i"] is None:
        factors = [match["i_only"], "0", match["k_only"]]
    else:
        factors = [match["i"], match["j"], *([match["k"]] if match["k"] is not None else [])]
    return f"({', '.join(f'{factor}1' if factor in ('', '+', '-') else factor for factor in factors)})"


def as_tuple(rows: Rows | None) -> str | None:
    """Return a vector, a matrix of one column or one row, as a tuple; None for any other."""
    cells = [cell for row in rows or () for cell in row]
    return f"({', '.join(cells)})" if rows and len(cells) > 1 and 1 in (len(rows), len(rows[0])) else None


def bracketed(text: str) -> tuple[str, ...] | None:
    """Return the items between round or square brackets, or None."""
    pair = enclosing_delimiters(text)
    return tuple(split_top_level(text[1:-1])) if pair in (("(", ")"), ("[", "]")) else None


def inside_of(text: str, pair: tuple[str, str] | None) -> str:
    return text if pair is None else text[len(pair[0]) : -len(pair[1])].strip()
