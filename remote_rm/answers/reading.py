"""The canonical form of an answer, what kind of value it is by that form, and its parts: intervals, matrices and lists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from remote_rm.answers.lexer import Match
from remote_rm.answers.lexer.latex import Latex
from remote_rm.answers.lexer.values import CURRENCIES
from remote_rm.answers.notation import Kind, read_notation
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.units import split_unit

_FRACTIONS = {
    sign: tuple(parts)
    for sign, parts in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "12 13 23 14 34 15 25 35 45 16 56 18 38 58 78".split(), strict=True)
}
_UNICODE_TO_LATEX = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "÷": r"\div ",
        "·": r"\cdot ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "˚": r"^\circ ",
        "∶": ":",
        "′": "'",
        "″": '"',
        "⌊": r"\lfloor ",
        "⌋": r"\rfloor ",
        "⌈": r"\lceil ",
        "⌉": r"\rceil ",
        "∅": r"\emptyset ",
        "√": r"\sqrt ",
        **{sign: rf"\frac{{{top}}}{{{bottom}}}" for sign, (top, bottom) in _FRACTIONS.items()},
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "∈": r"\in ",
        "≈": r"\approx ",
        "∠": r"\angle ",
        "△": r"\triangle ",
        "“": '"',
        "”": '"',
        "’": "'",
        "、": ",",
        "或": " or ",
        "和": " and ",
        "\u3000": " ",
        # The full-width forms of Chinese and Japanese keyboards.
        **{chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)},
    }
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
    text = Latex.SPACED_THOUSANDS.sub(",", text.replace("{:}", ":")).replace(r"\!", "")
    text = Latex.THIN_SPACED_THOUSANDS.sub("", text)
    text = Latex.RAISED.sub(lambda match: "^{" + match[0].translate(_RAISED_DIGITS) + "}", text)
    text = Latex.LOWERED.sub(lambda match: "_{" + match[0].translate(_LOWERED_DIGITS) + "}", text)
    text = Latex.INTEGERS_ONLY.sub("", text)
    text = text.replace("{,}", ",")
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
    text = text.translate(_UNICODE_TO_LATEX).replace(r"\$", "").replace("$", "")
    text = Latex.MATH_BRACKETS.sub(" ", text).replace(r"\%", "%")
    text = Latex.SPACE_COMMANDS.sub(" ", Latex.DROPPED_COMMANDS.sub("", text))
    if "^{-" in text:
        text = Latex.INVERSE_UNIT.sub(_over_unit, text)
    for _ in range(MAX_NESTED_COMMANDS):
        text, count = Latex.TEXT_COMMANDS.subn(r"\1", text)
        if not count:
            break
    text = " ".join(text.split())
    if "^{-" in text:
        text = Latex.INVERSE_UNIT.sub(_over_unit, text)
    for pattern, spelling in Latex.SPELLINGS:
        text = pattern.sub(spelling, text)
    text = Latex.LOOSE_SPACE.sub(r"\1\2", " ".join(text.split()))
    text = Latex.SPACE_AFTER_COMMAND.sub(r"\1", Latex.SPACED_SIGN.sub(r"\1", text))
    return _strip_wrapping(text)


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
    for pattern, replacement in Latex.BARE_LATEX:
        text = pattern.sub(replacement, text)
    return text.strip()


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
    """Without Markdown emphasis, quotes, closing full stops, and brackets or braces around a single value."""
    while True:
        shorter = Latex.AROUND_VALUE.sub(lambda match: match[0][0] if match[0][0] == "-" else "", text.strip(" *`"))
        shorter = _without_quotes(shorter).rstrip(".,;?:。")
        pair = enclosing_delimiters(shorter)
        if pair in (("(", ")"), ("{", "}")) and len(split_top_level(shorter[1:-1])) == 1:
            shorter = shorter[1:-1]
        if shorter == text:
            return text
        text = shorter


def _without_quotes(text: str) -> str:
    """Without quotes around the text; those after a number are feet, inches or derivatives: `5'10"`, `y'`."""
    is_quoted = len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]
    return text[1:-1].strip() if is_quoted else text


_INFINITE = ("-\\infty", "\\infty")

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
    hole = Latex.HOLE.fullmatch(text)
    if hole is not None:
        ends = (_end(hole[2]), "\\infty")
        left = Span(left="-\\infty", right=ends[0], brackets=("(", ")"))
        return Region(spans=(left, Span(left=ends[0], right=ends[1], brackets=("(", ")"))), variable=hole[1])
    body, variable = without_membership(_without_set_builder(text))
    pieces = [piece.strip() for piece in Latex.UNION.split(body)]
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
    match = Latex.MEMBERSHIP.match(text)
    return (text[match.end() :].strip(), match[1]) if match else (text, "")


def _without_set_builder(text: str) -> str:
    match = Latex.SET_BUILDER.fullmatch(text)
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
    parts = Latex.RELATION_SIGN.split(text)
    if any(set(part) & set("=,;:") or Latex.WORDS.search(part) for part in parts[::2]):
        return None
    if len(parts) == 3:
        left, sign, right = parts
        if Latex.VARIABLE.fullmatch(left) and not Latex.VARIABLE.fullmatch(right):
            return _ray(sign, right), left
        return (_ray(_MIRRORED[sign], left), right) if Latex.VARIABLE.fullmatch(right) and left else None
    if len(parts) != 5 or not Latex.VARIABLE.fullmatch(parts[2]) or not parts[0] or not parts[4]:
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
    match = Latex.MATRIX.fullmatch(text)
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
    mixed = Latex.MIXED_NUMBER.fullmatch(text)
    is_worked_out = mixed is not None and int(mixed[1] or mixed[3]) < int(mixed[2] or mixed[4])
    return Kind.COMPUTATION if Latex.COMPUTATION.fullmatch(text) and not is_worked_out else Kind.EXPRESSION


def is_text(text: str) -> bool:
    """Return whether the text is words; sympy would read `north` as a product, equal to `thorn`."""
    if Latex.WORDS_ONLY.fullmatch(text) and not Latex.FUNCTION_NAME.fullmatch(text):
        return True
    if Latex.GEOMETRIC_NAME.search(text) and "=" not in text:
        return True
    return Latex.LONG_WORD.search(without_environments(text)) is not None and parse_quantity(text) is None


def has_relation(text: str) -> bool:
    """Return whether the text is an equation, an inequality or a membership."""
    return Latex.RELATION.search(text) is not None


def elements(inside: str, *, length: int | None = None) -> list[str]:
    """Return the elements of a list without its brackets: between commas, semicolons, `and` and `or`, else between spaces.

    Spaces separate numbers, or whatever is `length` pieces: `9 100` is a number with its thousands apart.
    """
    items, spaced = split_top_level(Latex.LIST_WORDS.sub(", ", inside)), inside.split()
    if len(items) != 1 or len(spaced) < 2:
        return items
    if length is None:
        return spaced if all(Latex.PLAIN_NUMBER.fullmatch(item) for item in spaced) else items
    return spaced if len(spaced) == length and r"\pm" not in inside and parse_quantity(inside) is None else items


def gold_sequence(gold: str) -> list[str] | None:
    """Return the elements of a gold sequence, or None for a single value: `1,234` is a number, `1, 234` two."""
    gold = Latex.TUPLE_ASSIGNMENT.sub("", gold)
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
    return [Latex.PLUS_MINUS.sub(sign, item) for sign in ("+", "-")]


def inside_of(text: str, pair: tuple[str, str] | None) -> str:
    return text if pair is None else text[len(pair[0]) : -len(pair[1])].strip()
