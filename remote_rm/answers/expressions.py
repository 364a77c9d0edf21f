r"""Reads expressions of numbers, letters, roots and functions, whatever they are computed in: exactly, or at a point."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

from remote_rm.answers.lexer.latex import Latex
from remote_rm.answers.reading import to_latex

MAX_CHARS = 300
MAX_DIGITS = 30
"""Of one number as written."""
MAX_POWER = 40
MAX_DEPTH = 20
_LETTERS = frozenset(
    r"\pi \alpha \beta \gamma \delta \epsilon \theta \lambda \mu \rho \sigma \tau \phi \varphi \psi \omega".split()
)
_FUNCTIONS = frozenset(r"\sin \cos \tan \cot \sec \csc \ln".split())
_TIMES = (r"\cdot", r"\times")
_DIVIDED = ("/", r"\div")

Value = TypeVar("Value")


class Undecided(Exception):
    """The text is no such expression, or too large a one."""


def parsed(text: str, ring: Ring[Value]) -> Value:
    """Return the value of a normalised expression; raises Undecided if it is none, or too large a one."""
    if len(text) > MAX_CHARS:
        raise Undecided
    parser = _Parser(tokens=_tokens(in_radians(to_latex(text))), ring=ring)
    value = parser.total(depth=0)
    if parser.next is not None:
        raise Undecided
    return value


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


class Ring(Protocol[Value]):
    """What expressions are computed in; every operation may raise Undecided."""

    def number(self, number: Fraction) -> Value: ...

    def letter(self, name: str) -> Value: ...

    def total(self, first: Value, second: Value) -> Value: ...

    def negated(self, value: Value) -> Value: ...

    def product(self, first: Value, second: Value) -> Value: ...

    def inverted(self, value: Value) -> Value: ...

    def power(self, base: Value, exponent: Value) -> Value: ...

    def root(self, value: Value, index: int) -> Value: ...

    def function(self, name: str, value: Value) -> Value: ...


@dataclass(kw_only=True)
class _Parser(Generic[Value]):
    """A parser by recursive descent; every method reads one thing and leaves `position` after it."""

    tokens: list[str]
    ring: Ring[Value]
    position: int = 0

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

    def total(self, *, depth: int) -> Value:
        """Terms with plus and minus signs between them."""
        if depth > MAX_DEPTH:
            raise Undecided
        sign = self.take("+", "-")
        value = self.product(depth=depth)
        if sign == "-":
            value = self.ring.negated(value)
        while (sign := self.take("+", "-")) is not None:
            term = self.product(depth=depth)
            value = self.ring.total(value, self.ring.negated(term) if sign == "-" else term)
        return value

    def product(self, *, depth: int) -> Value:
        """Factors with or without signs between them; what a product without signs after a slash means is left open."""
        value = self.power(depth=depth)
        is_divided = False
        while self.next is not None and self.next not in ("+", "-", ")", "}", "]"):
            if self.take(*_TIMES):
                value, is_divided = self.ring.product(value, self.power(depth=depth)), False
            elif self.take(*_DIVIDED):
                value, is_divided = self.ring.product(value, self.ring.inverted(self.power(depth=depth))), True
            else:
                is_mixed_number = self.next == r"\frac" and _is_number(self.tokens[self.position - 1])
                if is_divided or is_mixed_number or _is_number(self.next):
                    raise Undecided
                value = self.ring.product(value, self.power(depth=depth))
        return value

    def power(self, *, depth: int) -> Value:
        """A factor and its exponent."""
        base = self.factor(depth=depth)
        if not self.take("^"):
            return base
        value = self.ring.power(base, self.exponent(depth=depth))
        if self.next == "^":
            raise Undecided
        return value

    def exponent(self, *, depth: int) -> Value:
        return self.braced(depth=depth) if self.next == "{" else self.factor(depth=depth)

    def factor(self, *, depth: int) -> Value:
        """A number, a letter, a fraction, a root, a function's value, or a sum in brackets."""
        token = self.next
        if token is None:
            raise Undecided
        if token in ("(", "{"):
            return self.braced(depth=depth)
        self.position += 1
        if _is_number(token):
            if len(token) > MAX_DIGITS:
                raise Undecided
            return self.ring.number(Fraction(token))
        if token in _LETTERS or token[0].isalpha():
            return self.ring.letter(token.replace("{", "").replace("}", ""))
        if token == r"\frac":
            top = self.braced(depth=depth)
            return self.ring.product(top, self.ring.inverted(self.braced(depth=depth)))
        if token == r"\sqrt":
            return self.root(depth=depth)
        if token in _FUNCTIONS:
            return self.function(token, depth=depth)
        raise Undecided

    def root(self, *, depth: int) -> Value:
        """The square root of what is in braces, or the root whose index is in brackets before it."""
        index = "2"
        if self.take("["):
            index, self.position = self.next or "", self.position + 1
            if not index.isdecimal() or len(index) > 2 or index in ("0", "1") or not self.take("]"):
                raise Undecided
        if self.next != "{":
            raise Undecided
        return self.ring.root(self.braced(depth=depth), int(index))

    def function(self, name: str, *, depth: int) -> Value:
        r"""A function of what is in brackets, or of one letter at the end of a factor; `\sin 2x` and `\sin xy` are left open."""
        exponent = self.exponent(depth=depth) if self.take("^") else None
        if self.next in ("(", "{"):
            value = self.ring.function(name, self.braced(depth=depth))
        else:
            if self.next is None or not (self.next in _LETTERS or self.next[0].isalpha()):
                raise Undecided
            value = self.ring.function(name, self.factor(depth=depth))
            if self.next not in (None, "+", "-", ")", "}", "]", *_TIMES, *_DIVIDED, *_FUNCTIONS):
                raise Undecided
        if self.next == "^":
            raise Undecided
        return value if exponent is None else self.ring.power(value, exponent)

    def braced(self, *, depth: int) -> Value:
        """A sum within brackets."""
        opening = self.take("(", "{")
        if opening is None:
            raise Undecided
        value = self.total(depth=depth + 1)
        if not self.take({"(": ")", "{": "}"}[opening]):
            raise Undecided
        return value


def in_radians(latex: str) -> str:
    r"""Degrees within trigonometric functions as multiples of pi, which sympy computes in: `\cos 60^\circ`."""
    with_exponentials = Latex.CIS.sub(r"e^{i \1}", latex)
    if with_exponentials == latex and not Latex.TRIGONOMETRIC.search(latex):
        return latex
    return Latex.DEGREES.sub(r"{\\frac{\1\\pi}{180}}", with_exponentials)
