"""Compares two normalised answers by math-verify, to the gold's own precision; loads sympy, so workers only."""

import logging
import re
from functools import lru_cache

from remote_rm.answers.normalization import to_latex
from remote_rm.answers.quantity import parse_quantity, rounded_places

EXACT_DECIMALS = 12
"""Decimal places to which floating-point values of exact golds are compared."""
CACHED_GOLDS = 4096
"""How many parsed golds a worker keeps: the samples of one prompt share a gold, and every epoch has it again."""
CACHED_VERDICTS = 4096
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^(?:\\circ|\{\\circ\})")
_CIS = re.compile(
    r"(?:\\operatorname\{cis\}|cis)\s*\(?\s*(\d+(?:\.\d+)?\^\\circ|-?\\frac\{[^{}]*\}\{[^{}]*\}|[\d\\pi/]+)\s*\)?"
)
_INDEX_I = re.compile(r"\\(?:sum|prod)(?![A-Za-z])|_\{?i|i\s?=")


# Many samples of one prompt end in the same answer.
@lru_cache(maxsize=CACHED_VERDICTS)
def same_expression(answer: str, gold: str) -> bool:
    """Return whether math-verify finds the normalised answer equal to the normalised gold; may run without end."""
    # This import pulls in sympy (half a second); the server process never needs it.
    from math_verify import verify

    gold_parsed = list(_parsed_gold(gold))
    answer_parsed = _parse(answer) if gold_parsed else []
    gold_number = parse_quantity(gold)
    places = None if gold_number is None else rounded_places(gold_number)
    return verify(
        gold_parsed,
        answer_parsed,
        float_rounding=EXACT_DECIMALS if places is None else places,
        timeout_seconds=None,
    )


@lru_cache(maxsize=CACHED_GOLDS)
def _parsed_gold(gold: str) -> tuple:
    return tuple(_parse(gold))


def _parse(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    # Without time limits of its own, which need the main thread's signals, it warns: the pool keeps the time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex = _in_radians(to_latex(text)).replace("%", r"\%")
    values = parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return values if _INDEX_I.search(latex) else [_with_imaginary_unit(value) for value in values]


def _in_radians(latex: str) -> str:
    r"""Degrees within trigonometric functions as multiples of pi, which sympy computes in: `\cos 60^\circ`."""
    with_exponentials = _CIS.sub(r"e^{i \1}", latex)
    if with_exponentials == latex and not _TRIGONOMETRIC.search(latex):
        return latex
    return _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", with_exponentials)


def _with_imaginary_unit(value: object) -> object:
    """The value with the letter i read as the imaginary unit, which the grammar takes for a variable."""
    from sympy import Expr, I

    if not isinstance(value, Expr):
        return value
    letters = [letter for letter in value.free_symbols if letter.name == "i"]
    return value.subs(letters[0], I) if letters else value
