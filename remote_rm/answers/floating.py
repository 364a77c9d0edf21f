r"""Compares expressions by their values in floating-point numbers, with a bound on their error; no sympy is needed."""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from random import Random

from remote_rm.answers.expressions import MAX_POWER, Undecided, parsed

TURNS = ((0.0, 0.0), (0.0, 0.0), (1.7, 3.0), (-3.0, -1.7), (-3.0, 3.0))
"""At these angles two expressions are compared: on the positive axis, and where roots of products have other signs."""
REAL_POINTS = 2
MAX_ARGUMENT = 100
"""Of a function whose values repeat."""
TINY = 1e-9
TINY_RELATIVE = 1e-15
"""More than the error of one operation on floating-point numbers, as a share of its result."""
LARGEST = 1e300
FAR = 1e6
"""Beyond this, and below its inverse, a part of an expression may be lost in the error of another part."""
MAX_EXPONENT = 300


@dataclass(frozen=True)
class _Approximate:
    """A number and how far it may be from the exact one."""

    value: complex
    error: float


class _AtPoint:
    """Floating-point numbers with a bound on their error, where letters have values between 1/2 and 3/2.

    TURNS says how far each is then turned around zero in the complex plane, at every place.
    """

    def __init__(self, place: int) -> None:
        self._values: dict[str, complex] = {"i": 1j, "e": math.e, r"\pi": math.pi}
        self._place = place
        self.is_close = True
        """Whether all values so far are near enough to one another for equal results to mean something."""

    def number(self, number: Fraction) -> _Approximate:
        return self._near(float(number), 0.0)

    def letter(self, name: str) -> _Approximate:
        # Both sides of a comparison have the same values, whichever letter comes first.
        chance = Random(f"{self._place} {name}")
        turn = cmath.exp(1j * chance.uniform(*TURNS[self._place]))
        return self._near(self._values.get(name) or turn * chance.uniform(0.5, 1.5), 0.0)

    def total(self, first: _Approximate, second: _Approximate) -> _Approximate:
        return self._near(first.value + second.value, first.error + second.error)

    def negated(self, value: _Approximate) -> _Approximate:
        return _Approximate(-value.value, value.error)

    def product(self, first: _Approximate, second: _Approximate) -> _Approximate:
        error = abs(first.value) * second.error + abs(second.value) * first.error + first.error * second.error
        return self._near(first.value * second.value, error)

    def inverted(self, value: _Approximate) -> _Approximate:
        least = abs(value.value) - value.error
        if least <= value.error:
            raise Undecided
        return self._near(1 / value.value, value.error / least**2)

    def power(self, base: _Approximate, exponent: _Approximate) -> _Approximate:
        if exponent.value.imag == 0 and exponent.value.real == int(exponent.value.real) and exponent.error < TINY:
            return self._whole_power(base, int(exponent.value.real))
        if base.value.real <= 2 * base.error and abs(base.value.imag) <= 2 * base.error:
            # Which of its roots is meant is left open.
            raise Undecided
        logarithm = self._near(cmath.log(base.value), base.error / (abs(base.value) - base.error))
        return self.exponential(self.product(logarithm, exponent))

    def _whole_power(self, base: _Approximate, exponent: int) -> _Approximate:
        if abs(exponent) > MAX_POWER:
            raise Undecided
        value = self.number(Fraction(1))
        for _ in range(abs(exponent)):
            value = self.product(value, base)
        return self.inverted(value) if exponent < 0 else value

    def exponential(self, value: _Approximate) -> _Approximate:
        if abs(value.value) > MAX_EXPONENT or value.error > TINY:
            raise Undecided
        found = cmath.exp(value.value)
        return self._near(found, 2 * abs(found) * value.error)

    def root(self, value: _Approximate, index: int) -> _Approximate:
        if index % 2 and value.value.real < 0 and value.value.imag == 0:
            return self.negated(self.root(self.negated(value), index))
        if value.value == 0:
            return value
        if index == 2:
            if abs(value.value) <= 2 * value.error:
                raise Undecided
            return self._near(cmath.sqrt(value.value), value.error / math.sqrt(abs(value.value)))
        return self.power(value, _Approximate(1 / index, TINY_RELATIVE))

    def function(self, name: str, value: _Approximate) -> _Approximate:
        number, error = value.value, value.error
        if abs(number) > MAX_ARGUMENT or error > TINY:
            raise Undecided
        if name == r"\ln":
            if number.real <= 2 * error and abs(number.imag) <= 2 * error:
                raise Undecided
            return self._near(cmath.log(number), error / (abs(number) - error))
        # No slope of theirs is larger.
        slope = math.cosh(number.imag)
        sine = self._near(cmath.sin(number), 2 * slope * error + TINY_RELATIVE * slope)
        cosine = self._near(cmath.cos(number), 2 * slope * error + TINY_RELATIVE * slope)
        top, bottom = {
            r"\sin": (sine, None), r"\cos": (cosine, None), r"\tan": (sine, cosine), r"\cot": (cosine, sine),
            r"\sec": (None, cosine), r"\csc": (None, sine),
        }[name]  # fmt: skip
        under = self.number(Fraction(1)) if bottom is None else self.inverted(bottom)
        return under if top is None else self.product(top, under)

    def _near(self, value: complex, error: float) -> _Approximate:
        if not cmath.isfinite(value) or abs(value) > LARGEST:
            raise Undecided
        self.is_close &= value == 0 or 1 / FAR < abs(value) < FAR
        return _Approximate(value, error + TINY_RELATIVE * abs(value))


def same_at_points(answer: str, gold: str) -> bool | None:
    r"""Return whether two expressions have the same values where their letters have some; None if that is not decided.

    `10^{-\frac{1+\sqrt{2}}{2}}` and `10^{\frac{-1-\sqrt{2}}{2}}` have; `\sec x` and `\csc x` have not. Different values for
    positive letters prove that the expressions are different. Equal ones at all places are no proof, but of what people
    write only equal expressions have them. Expressions that are equal for positive letters only are left open.
    """
    try:
        for place in range(len(TURNS)):
            point = _AtPoint(place)
            first, second = parsed(answer, point), parsed(gold, point)
            error = first.error + second.error
            if abs(first.value - second.value) > error:
                return False if place < REAL_POINTS else None
            if not point.is_close or error > TINY * max(abs(first.value), abs(second.value)):
                return None
    except (Undecided, OverflowError):
        return None
    return True


class _Numbers(_AtPoint):
    """The same without letters."""

    def __init__(self) -> None:
        super().__init__(0)

    def letter(self, name: str) -> _Approximate:
        if name != r"\pi":
            raise Undecided
        return super().letter(name)


@lru_cache(maxsize=512)
def numeric_value(text: str) -> float | None:
    r"""Return the value of a normalised expression of numbers, roots, functions and \pi; None for any other text."""
    try:
        value = parsed(text, _Numbers()).value
    except (Undecided, OverflowError):
        return None
    return value.real if value.imag == 0 else None
