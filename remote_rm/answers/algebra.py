r"""Compares expressions by their values at points, in floating point with a bound on the error, or else by math-verify.

Only workers load math-verify and sympy.
"""

from __future__ import annotations

import cmath
import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from random import Random

from remote_rm.answers.lexer import Latex
from remote_rm.answers.quantity import parse_quantity, rounded_places
from remote_rm.answers.reading import to_latex

MAX_CHARS = 300
MAX_DIGITS = 15
"""Of one number as written: a float has no more."""
MAX_POWER = 40
MAX_DEPTH = 20
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
_CONSTANTS = {"i": 1j, "e": math.e, r"\pi": math.pi}
_LETTERS = frozenset(
    r"\pi \alpha \beta \gamma \delta \epsilon \theta \lambda \mu \rho \sigma \tau \phi \varphi \psi \omega".split()
)
_FUNCTIONS = frozenset(r"\sin \cos \tan \cot \sec \csc \ln".split())
_TIMES = (r"\cdot", r"\times")
_DIVIDED = ("/", r"\div")
_AFTER_SUM = ("+", "-", ")", "}", "]")


class Undecided(Exception):
    """The text is no such expression, or too large a one."""


@dataclass(frozen=True)
class Value:
    """What an expression is at a point."""

    number: complex
    error: float = 0.0
    """How far the exact number may be from it."""
    degree: int = 0
    """In its letters: 1 if it is linear, 2 if it may be more."""
    is_close: bool = True
    """Whether all parts are near enough to one another for equal results to mean something."""

    def __add__(self, other: Value) -> Value:
        return _near(self.number + other.number, self.error + other.error, self, other)

    def __neg__(self) -> Value:
        return Value(-self.number, self.error, self.degree, self.is_close)

    def __mul__(self, other: Value) -> Value:
        error = abs(self.number) * other.error + abs(other.number) * self.error + self.error * other.error
        return _near(self.number * other.number, error, self, other, degree=self.degree + other.degree)

    def inverted(self) -> Value:
        least = abs(self.number) - self.error
        if least <= self.error:
            raise Undecided
        return _near(1 / self.number, self.error / least**2, self, degree=2 * self.degree)

    def __pow__(self, exponent: Value) -> Value:
        power = exponent.number.real
        if exponent.number == int(power) and exponent.error < TINY:
            if abs(power) > MAX_POWER:
                raise Undecided
            value = math.prod([self] * abs(int(power)), start=_near(1.0))
            return value.inverted() if power < 0 else value
        exponent = self.logarithm() * exponent
        if abs(exponent.number) > MAX_EXPONENT or exponent.error > TINY:
            raise Undecided
        found = cmath.exp(exponent.number)
        return _near(found, 2 * abs(found) * exponent.error, exponent, degree=2)

    def logarithm(self) -> Value:
        # Which of the roots of a negative number is meant is left open.
        if self.number.real <= 2 * self.error and abs(self.number.imag) <= 2 * self.error:
            raise Undecided
        return _near(cmath.log(self.number), self.error / (abs(self.number) - self.error), self, degree=2)

    def root(self, index: int) -> Value:
        if index % 2 and self.number.real < 0 and self.number.imag == 0:
            return -(-self).root(index)
        if self.number == 0:
            return self
        if index != 2:
            return self ** Value(1 / index, TINY_RELATIVE)
        if abs(self.number) <= 2 * self.error:
            raise Undecided
        return _near(
            cmath.sqrt(self.number), self.error / math.sqrt(abs(self.number)), self, degree=2 * min(self.degree, 1)
        )

    def function(self, name: str) -> Value:
        if abs(self.number) > MAX_ARGUMENT or self.error > TINY:
            raise Undecided
        if name == r"\ln":
            return self.logarithm()
        # No slope of theirs is larger.
        slope = math.cosh(self.number.imag)
        error = 2 * slope * self.error + TINY_RELATIVE * slope
        sine, cosine = (_near(wave(self.number), error, self, degree=2) for wave in (cmath.sin, cmath.cos))
        if name in (r"\sec", r"\csc"):
            return (cosine if name == r"\sec" else sine).inverted()
        if name in (r"\tan", r"\cot"):
            return sine * cosine.inverted() if name == r"\tan" else cosine * sine.inverted()
        return sine if name == r"\sin" else cosine


def _near(number: complex, error: float = 0.0, *parts: Value, degree: int | None = None) -> Value:
    """The result of an operation on the parts; as linear as they are unless said otherwise."""
    if not cmath.isfinite(number) or abs(number) > LARGEST:
        raise Undecided
    is_close = all(part.is_close for part in parts) and (number == 0 or 1 / FAR < abs(number) < FAR)
    highest = max((part.degree for part in parts), default=0)
    # What has no letters has none after any operation.
    return Value(
        number, error + TINY_RELATIVE * abs(number), min(highest and (degree or highest), 2), is_close=is_close
    )


@lru_cache(maxsize=4096)
def value_at(text: str, place: int) -> Value | None:
    """Return the value of a normalised expression at one of the places of TURNS; None if it has none there."""
    return _computed(text, place)


@lru_cache(maxsize=512)
def numeric_value(text: str) -> float | None:
    r"""Return the value of a normalised expression of numbers, roots, functions and \pi; None for any other text."""
    value = _computed(text, None)
    return value.number.real if value is not None and complex(value.number).imag == 0 else None


def _computed(text: str, place: int | None) -> Value | None:
    if len(text) > MAX_CHARS:
        return None
    try:
        parser = _Parser(tokens=_tokens(in_radians(to_latex(text))), place=place)
        value = parser.total()
    except (Undecided, OverflowError):
        return None
    return value if parser.next is None else None


def _tokens(latex: str) -> list[str]:
    if Latex.NAME_OF_WORDS.search(latex):
        raise Undecided
    tokens, position = [], 0
    while position < len(latex):
        match = Latex.ALGEBRA.match(latex, position)
        if match is None:
            raise Undecided
        tokens.append(match[match.lastindex or 0])
        position = match.end()
    return tokens


def _is_number(token: str) -> bool:
    return token[0].isdigit() or token[0] == "."


@lru_cache(maxsize=1024)
def _letter(name: str, place: int) -> Value:
    """The value of a letter, between 1/2 and 3/2, turned around zero in the complex plane as TURNS says for the place."""
    # Both sides of a comparison have the same values, whichever letter comes first.
    chance = Random(f"{place} {name}")
    turn = cmath.exp(1j * chance.uniform(*TURNS[place]))
    number = turn * chance.uniform(0.5, 1.5)
    return Value(number, TINY_RELATIVE * abs(number), degree=1)


@dataclass(kw_only=True)
class _Parser:
    """A parser by recursive descent; every method reads one thing and leaves `position` after it."""

    tokens: list[str]
    place: int | None
    """Where its letters have values; None if it has no letters."""
    position: int = 0
    depth: int = 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, *expected: str) -> str | None:
        """The next token if it is one of the expected."""
        token = self.next
        if token not in expected:
            return None
        self.position += 1
        return token

    def total(self) -> Value:
        """Terms with plus and minus signs between them."""
        sign = self.take("+", "-")
        value = -self.product() if sign == "-" else self.product()
        while (sign := self.take("+", "-")) is not None:
            term = self.product()
            value = value + (-term if sign == "-" else term)
        return value

    def product(self) -> Value:
        """Factors with or without signs between them; what a product without signs after a slash means is left open."""
        value, is_divided = self.power(), False
        while self.next is not None and self.next not in _AFTER_SUM:
            if self.take(*_TIMES):
                value, is_divided = value * self.power(), False
            elif self.take(*_DIVIDED):
                value, is_divided = value * self.power().inverted(), True
            else:
                is_mixed_number = self.next == r"\frac" and _is_number(self.tokens[self.position - 1])
                if is_divided or is_mixed_number or _is_number(self.next):
                    raise Undecided
                value = value * self.power()
        return value

    def power(self) -> Value:
        """A factor and its exponent."""
        base = self.factor()
        value = base ** self.factor() if self.take("^") else base
        if self.next == "^":
            raise Undecided
        return value

    def factor(self) -> Value:
        """A number, a letter, a fraction, a root, a function's value, or a sum in brackets."""
        token = self.next or ""
        if token in ("(", "{"):
            return self.braced()
        self.position += 1
        if token and _is_number(token) and len(token) <= MAX_DIGITS:
            return _near(float(Fraction(token)))
        if token in _LETTERS or token[:1].isalpha():
            return self.letter(token.replace("{", "").replace("}", ""))
        if token == r"\frac":
            top = self.braced()
            return top * self.braced().inverted()
        if token == r"\sqrt":
            return self.root()
        if token in _FUNCTIONS:
            return self.function(token)
        raise Undecided

    def letter(self, name: str) -> Value:
        if self.place is None and name != r"\pi":
            raise Undecided
        return _near(_CONSTANTS[name]) if name in _CONSTANTS else _letter(name, self.place or 0)

    def root(self) -> Value:
        """The square root of what is in braces, or the root whose index is in brackets before it."""
        index = "2"
        if self.take("["):
            index, self.position = self.next or "", self.position + 1
            if not index.isdecimal() or len(index) > 2 or index in ("0", "1") or not self.take("]"):
                raise Undecided
        if self.next != "{":
            raise Undecided
        return self.braced().root(int(index))

    def function(self, name: str) -> Value:
        r"""A function of what is in brackets, or of one letter at the end of a factor; `\sin 2x` and `\sin xy` are left open."""
        exponent = self.factor() if self.take("^") else None
        if self.next in ("(", "{"):
            value = self.braced().function(name)
        else:
            if self.next is None or not (self.next in _LETTERS or self.next[0].isalpha()):
                raise Undecided
            value = self.factor().function(name)
            if self.next not in (None, *_AFTER_SUM, *_TIMES, *_DIVIDED, *_FUNCTIONS):
                raise Undecided
        if self.next == "^":
            raise Undecided
        return value if exponent is None else value**exponent

    def braced(self) -> Value:
        """A sum within brackets."""
        opening = self.take("(", "{")
        if opening is None or self.depth == MAX_DEPTH:
            raise Undecided
        self.depth += 1
        value = self.total()
        self.depth -= 1
        if not self.take({"(": ")", "{": "}"}[opening]):
            raise Undecided
        return value


def in_radians(latex: str) -> str:
    r"""Degrees within trigonometric functions as multiples of pi, which sympy computes in: `\cos 60^\circ`."""
    with_exponentials = Latex.CIS.sub(r"e^{i \1}", latex)
    if with_exponentials == latex and not Latex.TRIGONOMETRIC.search(latex):
        return latex
    return Latex.DEGREES.sub(r"{\\frac{\1\\pi}{180}}", with_exponentials)


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
        one, other = [_difference(equation, place) for equation in (answer, gold)]
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
