r"""Writes an answer in one canonical form, so that equal answers compare equal as strings where that is possible.

`$ \dfrac{1}{2} $.` → `\frac{1}{2}`, `90°` → `90^\circ`, `\text{12 cm}` → `12 cm`.
"""

import re

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
        "²": "^2",
        "³": "^3",
        "，": ",",
    }
)
_DROPPED_COMMANDS = re.compile(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|\\!")
_SPACE_COMMANDS = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\[,;: ]|~")
_THIN_SPACED_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_MATH_BRACKETS = re.compile(r"(?<!\\)\\[()\[\]]")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
_TEXT_COMMANDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|boxed|fbox)\s*\{([^{}]*)\}"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end|operatorname)\{[^{}]*\}")
_LOOSE_SPACE = re.compile(r"\s*([=*/^(){}\[\]<>;])\s*")
_SPACED_SIGN = re.compile(r"(?<=\S) ([+-]) (?=\S)")
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
    """Return the canonical form of an answer or a label; the empty string where nothing is left."""
    text = text.translate(_UNICODE_TO_LATEX).replace("{,}", ",").replace(r"\$", "").replace("$", "")
    text = _MATH_BRACKETS.sub(" ", _THIN_SPACED_THOUSANDS.sub("", text)).replace(r"\%", "%")
    text = _FRACTIONS.sub(r"\\frac", _SPACE_COMMANDS.sub(" ", _DROPPED_COMMANDS.sub("", text)))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    while (unwrapped := _TEXT_COMMANDS.sub(r"\1", text)) != text:
        text = unwrapped
    text = re.sub(r"\^\{\s*\\circ\s*\}", r"^\\circ", text)
    text = _SPACED_SIGN.sub(r"\1", _LOOSE_SPACE.sub(r"\1", " ".join(text.split())))
    return _strip_wrapping(text)


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
    """Return the parts between the commas and semicolons that stand outside all brackets; one part if there are none."""
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
        shorter = text.strip(" *`\"'").rstrip(".,;?:。")
        pair = enclosing_delimiters(shorter)
        if pair in (("(", ")"), ("{", "}")) and len(split_top_level(shorter[1:-1])) == 1:
            shorter = shorter[1:-1]
        if shorter == text:
            return text
        text = shorter
