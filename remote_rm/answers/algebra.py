r"""Compares expressions by their values at points, without sympy, or by math-verify, which only workers load."""

from __future__ import annotations

import logging
from functools import lru_cache

from remote_rm.answers.expressions import REAL_POINTS, TINY, TURNS, Undecided, Value, in_radians, value_at
from remote_rm.answers.lexer import Latex
from remote_rm.answers.quantity import parse_quantity, rounded_places
from remote_rm.answers.reading import to_latex


def same_algebra(answer: str, gold: str) -> bool | None:
    r"""Return whether two normalised expressions are equal for all values of their letters; None if that is not decided.

    `(x+2)(x+3)` and `x^2+5x+6` are, `2\sqrt{13}` and `2\sqrt{10}` are not; `n!` and inequalities are left open. Two
    equations are the same if one is a multiple of the other: `2y=4x+6` and `y-2x=3` do. Different values for positive
    letters prove that the expressions are different. Equal values everywhere are no strict proof, but unequal answers do not
    have them in practice. Expressions that are equal for positive letters only are left open.
    """
    are_equations = answer.count("=") == gold.count("=") == 1
    is_equal = _same_equation(answer, gold) if are_equations else _same_values(answer, gold)
    # Whether `X` may stand for `x` is not for this module to say.
    is_open = is_equal is False and Latex.CAPITAL.search(answer + gold) is not None
    return None if is_open else is_equal


def _same_values(answer: str, gold: str) -> bool | None:
    for place in range(len(TURNS)):
        first, second = value_at(answer, place), value_at(gold, place)
        if first is None or second is None:
            return None
        is_same = _agree(first, second)
        if not is_same:
            return False if is_same is False and place < REAL_POINTS else None
    return True


def _agree(first: Value, second: Value) -> bool | None:
    """Whether two values are the same; None if they may be, but are not near enough to other parts, or not exact enough."""
    error = first.error + second.error
    if abs(first.number - second.number) > error:
        return False
    is_sure = first.is_close and second.is_close and error <= TINY * max(abs(first.number), abs(second.number))
    return True if is_sure else None


def _same_equation(answer: str, gold: str) -> bool | None:
    """Whether one equation is a multiple of the other; only linear ones are found to be different."""
    at_first: tuple[Value, Value] | None = None
    for place in range(len(TURNS)):
        differences = [_difference(equation, place) for equation in (answer, gold)]
        one, other = differences
        if one is None or other is None or abs(one.number) <= one.error:
            return None
        at_first = at_first or (one, other)
        try:
            is_same = _agree(at_first[0] * other, one * at_first[1])
        except Undecided:
            return None
        if not is_same:
            is_linear = max(one.degree, other.degree) < 2
            return False if is_same is False and is_linear and place < REAL_POINTS else None
    return True


def _difference(equation: str, place: int) -> Value | None:
    """What the equation says is zero."""
    left, right = (value_at(side, place) for side in equation.split("="))
    try:
        return None if left is None or right is None else left + -right
    except Undecided:
        return None


EXACT_DECIMALS = 12
"""Decimal places to which floating-point values of exact golds are compared."""
CACHED_GOLDS = 4096
"""How many parsed golds a worker keeps: the samples of one prompt share a gold, and every epoch has it again."""
CACHED_VERDICTS = 4096


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
        gold_parsed, answer_parsed, float_rounding=EXACT_DECIMALS if places is None else places, timeout_seconds=None
    )


@lru_cache(maxsize=CACHED_GOLDS)
def _parsed_gold(gold: str) -> tuple:
    return tuple(_parse(gold))


def _parse(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    # Without time limits of its own, which need the main thread's signals, it warns: the pool keeps the time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex = in_radians(to_latex(text)).replace("%", r"\%")
    values = parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return values if Latex.INDEX_I.search(latex) else [_with_imaginary_unit(value) for value in values]


def _with_imaginary_unit(value: object) -> object:
    """The value with the letter i read as the imaginary unit, which the grammar takes for a variable."""
    from sympy import Expr, I

    if not isinstance(value, Expr):
        return value
    letters = [letter for letter in value.free_symbols if letter.name == "i"]
    return value.subs(letters[0], I) if letters else value
