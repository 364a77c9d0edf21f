r"""Compares expressions: exactly, without sympy, or by math-verify, which only workers load.

Sums, products, powers and quotients of numbers, square roots and letters become a quotient of two polynomials whose terms
are a rational number, the root of an integer without square factors, and letters: `\frac{6}{\sqrt{2}}` and `3\sqrt{2}` are
equal if the cross products are, term by term. math-verify compares to the gold's own precision.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isqrt

from remote_rm.answers.expressions import MAX_CHARS, MAX_POWER, Undecided, in_radians, parsed
from remote_rm.answers.floating import same_at_points
from remote_rm.answers.lexer.latex import Latex
from remote_rm.answers.quantity import parse_quantity, rounded_places
from remote_rm.answers.reading import to_latex

MAX_BITS = 2000
"""Of a coefficient."""
MAX_PRODUCTS = 1000
"""How many pairs of terms are multiplied for one text or comparison, which bounds its time to milliseconds."""
MAX_TERMS = 100
MAX_CACHED = 512
"""How many parsed texts are kept: the samples of a prompt share their gold, and every element of a list meets every other."""
MAX_RADICAND = 10**12
Monomial = tuple[int, tuple[tuple[str, int], ...]]
"""What a coefficient is multiplied by: the root of the first entry, and letters with their powers, sorted."""
Polynomial = dict[Monomial, Fraction]

_ONE: Monomial = (1, ())


@dataclass(kw_only=True)
class _Budget:
    products: int = MAX_PRODUCTS


@dataclass(frozen=True, kw_only=True)
class _Quotient:
    top: Polynomial
    bottom: Polynomial


def same_algebra(answer: str, gold: str) -> bool | None:
    r"""Return whether two normalised expressions are equal for all values of their letters; None if that is not decided.

    `(x+2)(x+3)` and `x^2+5x+6` are, `2\sqrt{13}` and `2\sqrt{10}` are not; `\sin x`, `n!` and inequalities
    are left open. Two equations are the same if one is a multiple of the other: `2y=4x+6` and `y-2x=3` do.
    """
    if len(answer) > MAX_CHARS or len(gold) > MAX_CHARS:
        return None
    if answer.count("=") == gold.count("=") == 1:
        return _same_equation(answer, gold)
    is_equal = _by_algebra(answer, gold)
    if is_equal is None:
        is_equal = same_at_points(answer, gold)
    if is_equal is not False:
        return is_equal
    # Whether `X` may stand for `x` is not for this module to say.
    has_capitals = Latex.CAPITAL.search(answer + gold) is not None
    return None if has_capitals else False


def _by_algebra(answer: str, gold: str) -> bool | None:
    first, second = _parsed(answer), _parsed(gold)
    if first is None or second is None:
        return None
    try:
        return _are_equal(first, second)
    except Undecided:
        return None


def _same_equation(answer: str, gold: str) -> bool | None:
    """Whether one equation is a multiple of the other; only linear ones are found to be different."""
    first, second = _parsed_equation(answer), _parsed_equation(gold)
    if not first or not second:
        return None
    monomial = next(iter(first))
    factor = second.get(monomial, Fraction(0)) / first[monomial]
    if factor and second == {each: factor * number for each, number in first.items()}:
        return True
    is_linear = all(_is_linear(monomial) for polynomial in (first, second) for monomial in polynomial)
    has_capitals = Latex.CAPITAL.search(answer + gold) is not None
    return False if is_linear and not has_capitals else None


def _parsed_equation(text: str) -> Polynomial | None:
    """What the equation says is zero, or None."""
    left, right = (_parsed(side) for side in text.split("="))
    if left is None or right is None:
        return None
    try:
        return _sum(left, _negated(right), _Budget()).top
    except Undecided:
        return None


def _is_linear(monomial: Monomial) -> bool:
    root, letters = monomial
    return root == 1 and sum(power for _, power in letters) <= 1


def _are_equal(first: _Quotient, second: _Quotient) -> bool:
    if first.bottom == second.bottom:
        return first.top == second.top
    budget = _Budget()
    return _multiply(first.top, second.bottom, budget) == _multiply(second.top, first.bottom, budget)


@lru_cache(maxsize=MAX_CACHED)
def _parsed(text: str) -> _Quotient | None:
    try:
        return parsed(text, _Exact())
    except Undecided:
        return None


class _Exact:
    """Quotients of polynomials with roots; a power has an integer for its exponent, and a root is of a number."""

    def __init__(self) -> None:
        self._budget = _Budget()

    def number(self, number: Fraction) -> _Quotient:
        return _whole(_constant(number))

    def letter(self, name: str) -> _Quotient:
        return _whole({(-1, ()): Fraction(1)} if name == "i" else {(1, ((name, 1),)): Fraction(1)})

    def total(self, first: _Quotient, second: _Quotient) -> _Quotient:
        return _sum(first, second, self._budget)

    def negated(self, value: _Quotient) -> _Quotient:
        return _negated(value)

    def product(self, first: _Quotient, second: _Quotient) -> _Quotient:
        return _Quotient(
            top=_multiply(first.top, second.top, self._budget),
            bottom=_multiply(first.bottom, second.bottom, self._budget),
        )

    def inverted(self, value: _Quotient) -> _Quotient:
        if not value.top:
            raise Undecided
        return _Quotient(top=value.bottom, bottom=value.top)

    def power(self, base: _Quotient, exponent: _Quotient) -> _Quotient:
        if exponent.bottom != _constant(Fraction(1)) or set(exponent.top) - {_ONE}:
            raise Undecided
        number = exponent.top.get(_ONE, Fraction(0))
        if number.denominator != 1 or abs(number) > MAX_POWER:
            raise Undecided
        base = self.inverted(base) if number < 0 else base
        value = _whole(_constant(Fraction(1)))
        for _ in range(abs(int(number))):
            value = self.product(value, base)
        return value

    def root(self, value: _Quotient, index: int) -> _Quotient:
        if index != 2 or set(value.top) - {_ONE} or set(value.bottom) != {_ONE}:
            raise Undecided
        return _whole(_root_of(value.top.get(_ONE, Fraction(0)) / value.bottom[_ONE]))

    def function(self, name: str, value: _Quotient) -> _Quotient:
        raise Undecided


def _constant(number: Fraction) -> Polynomial:
    return {_ONE: number} if number else {}


def _whole(polynomial: Polynomial) -> _Quotient:
    return _Quotient(top=polynomial, bottom=_constant(Fraction(1)))


def _negated(value: _Quotient) -> _Quotient:
    return _Quotient(top={monomial: -number for monomial, number in value.top.items()}, bottom=value.bottom)


def _sum(first: _Quotient, second: _Quotient, budget: _Budget) -> _Quotient:
    if first.bottom == second.bottom:
        return _Quotient(top=_add(first.top, second.top), bottom=first.bottom)
    left, right = _multiply(first.top, second.bottom, budget), _multiply(second.top, first.bottom, budget)
    return _Quotient(top=_add(left, right), bottom=_multiply(first.bottom, second.bottom, budget))


def _add(first: Polynomial, second: Polynomial) -> Polynomial:
    total = dict(first)
    for monomial, number in second.items():
        _put(total, monomial, number)
    return total


def _multiply(first: Polynomial, second: Polynomial, budget: _Budget) -> Polynomial:
    budget.products -= len(first) * len(second)
    if budget.products < 0:
        raise Undecided
    product: Polynomial = {}
    for (root, letters), number in first.items():
        for (other_root, other_letters), other_number in second.items():
            factor, both = _root_product(root, other_root)
            _put(product, (both, _letter_product(letters, other_letters)), factor * number * other_number)
    return product


def _put(polynomial: Polynomial, monomial: Monomial, number: Fraction) -> None:
    total = polynomial.get(monomial, Fraction(0)) + number
    if max(total.numerator.bit_length(), total.denominator.bit_length()) > MAX_BITS:
        raise Undecided
    if total:
        polynomial[monomial] = total
        if len(polynomial) > MAX_TERMS:
            raise Undecided
    else:
        polynomial.pop(monomial, None)


def _root_product(first: int, second: int) -> tuple[int, int]:
    r"""The product of two roots as an integer and a root: 6, 10 → 2, 15; of two imaginary ones, -2, -2 → -2, 1."""
    common = gcd(first, second)
    factor = -common if first < 0 and second < 0 else common
    return factor, first * second // common**2


def _letter_product(
    first: tuple[tuple[str, int], ...], second: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    if not first or not second:
        return first or second
    powers = dict(first)
    for letter, power in second:
        powers[letter] = powers.get(letter, 0) + power
    return tuple(sorted(powers.items()))


def _root_of(number: Fraction) -> Polynomial:
    if not number:
        return {}
    outside, inside = _without_squares(abs(number.numerator) * number.denominator)
    return {(-inside if number < 0 else inside, ()): Fraction(outside, number.denominator)}


@lru_cache(maxsize=1024)
def _without_squares(number: int) -> tuple[int, int]:
    """The number as a square and what is left: 72 → 6, 2."""
    if number > MAX_RADICAND:
        raise Undecided
    outside, inside, left, prime = 1, 1, number, 2
    while prime**3 <= left:
        count = 0
        while left % prime == 0:
            left, count = left // prime, count + 1
        outside, inside = outside * prime ** (count // 2), inside * prime ** (count % 2)
        prime += 1
    # What has no prime factor up to its cube root is a prime, a square of one, or a product of two.
    side = isqrt(left)
    return (outside * side, inside) if side * side == left else (outside, inside * left)


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
