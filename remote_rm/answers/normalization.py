r"""Writes an answer in one canonical form, so that equal answers compare equal as strings if possible.

`$ \dfrac{1}{2} $.` → `\frac{1}{2}`, `90°` → `90^\circ`, `\text{12 cm}` → `12 cm`.
"""

import re
from functools import lru_cache

_FRACTIONS = dict(zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", ("12", "13", "23", "14", "34", "15", "25", "35", "45", "16", "56", "18", "38", "58", "78")))
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
_DROPPED_COMMANDS = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?|rm|bf|it|hspace\{[^{}]*\})(?![A-Za-z])|\\!"
)
_SPACE_COMMANDS = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\[,;: ]|~")
_SPACED_THOUSANDS = re.compile(r"(?<=\d),\s?\\!\s*(?=\d{3})")
_RAISED = re.compile("[⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED_DIGITS = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_LOWERED_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# Which integers a family of solutions is about: "..., k \\in \\mathbb{Z}".
_CONDITION = re.compile(
    r"(?<=[\w})\]])(?:[\s,;]|\\ |\()+[kmn]\s*\\in\s*\\mathbb\s*\{?[ZN]\}?(?:\^\+)?\)?(?=[\s.$*]*$)"
)
_THIN_SPACED_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_AMOUNT = r"(?:-?\d[\d,]*(?:\.\d+)?|\.\d+)(?:[ ](?:thousand|million|billion|trillion)\b|[万亿])?"
_ESCAPED_DOLLARS = re.compile(rf"(?:(?<![\w.])US ?)?\\\$\s*({_AMOUNT})(?![\w^/]|\\(?![)\]])|\*(?!\*))")
# A dollar sign alone opens no formula.
_DOLLARS = re.compile(rf"^[\s*]*(?:US ?)?\$\s?({_AMOUNT})[\s*.]*$|(?<=\d)\s?\\\$(?!\d)|(?<=^)(-?[\d.,]+)\s?\$$")
_CURRENCY_BEFORE = re.compile(rf"(-?)([€£¥￥₹])\s?({_AMOUNT})(?![\w^/]|\\(?![)\]])|\*(?!\*))")
_CURRENCY_BEHIND = re.compile(r"(?<=\d)\s?([€£¥￥₹])")
_CURRENCIES = {"€": "euros", "£": "GBP", "¥": "yen", "￥": "yuan", "₹": "rupees"}
_CURRENCY_SIGN = re.compile("[€£¥￥₹]")
_NUMBER_TO_NUMBER = re.compile(r"(?<=\d)\s?[~～∼—]\s?(?=\d)")
_MATH_BRACKETS = re.compile(r"(?<!\\)\\[()\[\]]")
_TEXT_COMMANDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|bold|emph|mbox|hbox|boxed|fbox)"
    r"\s*\{([^{}]*)\}"
)
_CHEMISTRY = re.compile(r"\\(?:ce|mathrm)\s*\{(?=[A-Z])([A-Za-z\d()^+-]+(?:\^?\{[\d+-]+\})?)\}")
_CASES = re.compile(r"\\begin\{(?:cases|aligned)\}((?:[^&\\=]|\\(?![\\a-z]*(?:text|if)))*?=(?:(?!\\end|\btext|\bif\b)[^&])*)\\end\{(?:cases|aligned)\}")
_INVERSE_UNIT = re.compile(r"(?<=[A-Za-z}])\s*(?:\\cdot\s?|\s)(?:\\mathrm\{)?([A-Za-z]{1,3})\}?\^\{-(\d)\}")
_UNITS_OVER = frozenset("s m h min cm mm km kg g L mL mol K N J C A V W d".split())
_FOR_ALL = re.compile(
    r"(=.*?)[\s,]+for (?:all|every|any|each)(?:\s(?:real|complex|rational|natural|positive|nonnegative|non-negative|integers?"
    r"|numbers?|reals?|values? of))*(?:\s?[A-Za-z])?(?:\s?\\in\s?\\mathbb\s?\{[A-Z]\})?[\s.*]*$"
)
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)(?!\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d+|[A-Za-z](?![A-Za-z]))"), r"\\sqrt{\1}"),
    (re.compile(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<![\\\w])C\((\d+),\s*(\d+)\)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\pmod\s*(\w+)"), r"\\pmod{\1}"),
    (re.compile(r"(?<![\w.}])(\d+)/(\d+) (?=\\(?:pi|sqrt)(?![A-Za-z]))"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\[lc]dots(?![A-Za-z])|…"), r"\\dots "),
    (re.compile(r"^\s*(?:the )?(?:set of )?all (?:real numbers|reals)\W*$", re.IGNORECASE), r"\\mathbb{R}"),
    (re.compile(r"\\geqslant|\\geq(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\leqslant|\\leq(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\(?:varnothing|empty)(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"^(?:the )?(?:empty|null) set\W*$", re.IGNORECASE), r"\\emptyset"),
    (re.compile(r"\\degree(?![A-Za-z])|\^\{\s*\\circ\s*\}"), r"^\\circ "),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
    (re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])"), r"\\cup "),
    (re.compile(r"^[\s*`]*\]([^\[\]]+[,;][^\[\]]+)\[[\s.*`]*$"), r"(\1)"),
    (re.compile(r"^[\s*`]*\]([^\[\]]+[,;][^\[\]]+)\][\s.*`]*$"), r"(\1]"),
    (re.compile(r"^[\s*`]*\[([^\[\]]+[,;][^\[\]]+)\[[\s.*`]*$"), r"[\1)"),
    (re.compile(r"\\(?:langle)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rangle)(?![A-Za-z])"), ")"),
    (re.compile(r"(?<=\d)\s?[xX]\s?(?=\d)"), r"\\times "),
    (re.compile(r"(?<=\d)(?:\^\{?)?(?:st|nd|rd|th)\}?(?![A-Za-z])"), ""),
    (re.compile(r"(?<=\d)\s*([AaPp])\.?\s?[Mm](?![A-Za-z])\.?"), r" \1M"),
    (re.compile(r"_(?:\{\(?(\d+)\)?\}|\((\d+)\)|(\d+))(?!\w)"), r"_{\1\2\3}"),
    (re.compile(r"\\log_\{?e\}?(?![A-Za-z])"), r"\\ln "),
    (re.compile(r"(?<=10)\^(-?\d{2,}|-\d)(?!\d)"), r"^{\1}"),
    (re.compile(r",\s*&"), "&"),
    (re.compile(r"^all (?:the )?real (?:numbers|x)(?: x)? except(?: for)? (?:x\s*=)?\s*", re.IGNORECASE), r"x\\ne "),
    (re.compile(r"^all (?:integers|real numbers|reals|numbers|positive integers) (?=[a-z]\s*(?:[<>]|\\[lg]e))"), ""),
    (re.compile(r"^([^<>]+?)(<|\\le)\s*([a-z])\s+and\s+\3\s*(<|\\le)([^<>]+)$"), r"\1\2 \3\4\5"),
    (re.compile(r"\^\{([\w+-])\}"), r"^\1"),
    (_FOR_ALL, r"\1"),
)
_AROUND_VALUE = re.compile(
    r"^(?:\\approx|\\sim|approximately|about|roughly|USD|US)(?![A-Za-z])\s*(?=[-.\d\\])|^-\s+(?=[\d.\\])",
    re.IGNORECASE,
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end|operatorname)\{[^{}]*\}")
_LOOSE_SPACE = re.compile(r"\s*([=*/^({\[<>;]|[)}\]](?!\s[A-Za-z]))\s*|\s*([)}\]])")
_SPACED_SIGN = re.compile(r"(?<=\S) ([+-]) (?=\S)")
_SPACE_AFTER_COMMAND = re.compile(r"(\\[A-Za-z]+) (?=[^A-Za-z])|(?<!and)(?<!or) (?=\\[A-Za-z])")
MAX_NESTED_COMMANDS = 20
"""How many \\text{...} inside one another are unwrapped."""
MAX_CACHED_CHARS = 200
"""Longer texts are not kept, so that the cache stays within a few MiB."""
_DELIMITERS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_BARE_LATEX = (
    (re.compile(r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\w+)"), r"\\sqrt{\1}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"\^(-?\d{2,}|-\d)"), r"^{\1}"),
    (re.compile(r"\*"), r"\\cdot "),
)


def normalize(text: str) -> str:
    """Return the canonical form of an answer or a label; the empty string if nothing is left."""
    return _normalized(text) if len(text) <= MAX_CACHED_CHARS else _normalized.__wrapped__(text)


# The samples of one prompt share their label and mostly their answer.
@lru_cache(maxsize=8192)
def _normalized(text: str) -> str:
    text = _SPACED_THOUSANDS.sub(",", text.replace("{:}", ":")).replace(r"\!", "")
    text = _THIN_SPACED_THOUSANDS.sub("", text)
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_RAISED_DIGITS) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match[0].translate(_LOWERED_DIGITS) + "}", text)
    text = _CONDITION.sub("", text)
    text = text.replace("{,}", ",")
    if r"\ce" in text:
        text = _CHEMISTRY.sub(_as_formula, text)
    if r"\begin{" in text:
        text = _CASES.sub(lambda cases: ", ".join(row.strip(" ,") for row in cases[1].split(r"\\") if row.strip(" ,")), text)
    if "$" in text:
        text = _DOLLARS.sub(r"\1\2 dollars", _ESCAPED_DOLLARS.sub(r"\1 dollars", text))
    if _CURRENCY_SIGN.search(text):
        text = _CURRENCY_BEFORE.sub(lambda match: f"{match[1]}{match[3]} {_CURRENCIES[match[2]]}", text)
        text = _CURRENCY_BEHIND.sub(lambda match: f" {_CURRENCIES[match[1]]}", text)
        text = _CURRENCY_SIGN.sub("", text)
    text = _NUMBER_TO_NUMBER.sub("-", text)
    text = text.translate(_UNICODE_TO_LATEX).replace(r"\$", "").replace("$", "")
    text = _MATH_BRACKETS.sub(" ", text).replace(r"\%", "%")
    text = _SPACE_COMMANDS.sub(" ", _DROPPED_COMMANDS.sub("", text))
    if "^{-" in text:
        text = _INVERSE_UNIT.sub(_over_unit, text)
    for _ in range(MAX_NESTED_COMMANDS):
        text, count = _TEXT_COMMANDS.subn(r"\1", text)
        if not count:
            break
    text = " ".join(text.split())
    if "^{-" in text:
        text = _INVERSE_UNIT.sub(_over_unit, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _LOOSE_SPACE.sub(r"\1\2", " ".join(text.split()))
    text = _SPACE_AFTER_COMMAND.sub(r"\1", _SPACED_SIGN.sub(r"\1", text))
    return _strip_wrapping(text)


def _as_formula(chemistry: re.Match[str]) -> str:
    r"""A formula of mhchem in LaTeX: `\ce{SO4^2-}` → `SO_4^{2-}`, `\ce{Na+}` → `Na^+`."""
    formula, charge = chemistry[1], ""
    if found := re.search(r"(?:\^\{?(\d*[+-])\}?|(?<=[A-Za-z\d)])([+-]))$", formula):
        formula, charge = formula[: found.start()], f"^{{{found[1] or found[2]}}}"
    return re.sub(r"(?<=[A-Za-z)])(\d+)", r"_{\1}", formula) + charge


def _over_unit(unit: re.Match[str]) -> str:
    """`s^{-2}` after another unit as `/s^2`."""
    if unit[1] not in _UNITS_OVER:
        return unit[0]
    return f"/{unit[1]}" + ("" if unit[2] == "1" else f"^{unit[2]}")


def to_latex(text: str) -> str:
    r"""Return normalised plain-text mathematics as LaTeX: `sqrt(2)*x**10` → `\sqrt{2}\cdot x^{10}`."""
    for pattern, replacement in _BARE_LATEX:
        text = pattern.sub(replacement, text)
    return text.strip()


def without_environments(text: str) -> str:
    r"""Return the text without `\begin{...}`, `\end{...}` and `\operatorname{...}`, whose names are no words."""
    return _ENVIRONMENT.sub(" ", text)


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
        shorter = _AROUND_VALUE.sub(lambda match: match[0][0] if match[0][0] == "-" else "", text.strip(" *`"))
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
