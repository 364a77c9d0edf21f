r"""Expressions at points: pairs worked out by hand, and random expressions against sympy."""

import time

import pytest
import sympy
from helpers.tables import table
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.answers.algebra import same_algebra
from remote_rm.answers.reading import normalize


def same(answer: str, gold: str) -> bool | None:
    return same_algebra(normalize(answer), normalize(gold))


@pytest.mark.parametrize(("answer", "gold"), table("remote_rm/answers/algebra", "equal_for_all_values"))
def test_equal_for_all_values(answer, gold):
    assert same(answer, gold) is True
    assert same(gold, answer) is True


@pytest.mark.parametrize(("answer", "gold"), table("remote_rm/answers/algebra", "unequal"))
def test_unequal(answer, gold):
    assert same(answer, gold) is False
    assert same(gold, answer) is False


@pytest.mark.parametrize(
    "text",
    [
        r"\sin 2x", r"\sin xy", r"\log x", r"\ln(0)", r"(-8)^{1/3}", r"\sqrt[1]{5}", r"\sqrt[x]{5}", "5!", r"\binom{5}{2}", "|x|", "x=3", "1/2x",
        r"3\frac{1}{2}x", "f(x)", "word", "x^{41}", r"\frac{1}{0}", "9^{9^{9^9}}", r"\infty", "", "x 2", "(x+1", "x)", "1,234x", "9" * 31, "(" * 21 + "x" + ")" * 21,
        "(2^{40})^{30}(2^{40})^{30}", r"\frac12\%", "x'", "2^^2", "\\", "x" * 301,
    ],
)  # fmt: skip
def test_left_open(text):
    assert same_algebra(text, "7") is None


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"), table("remote_rm/answers/algebra", "equations_that_say_the_same")
)
def test_equations_that_say_the_same(answer, gold, verdict):
    assert same(answer, gold) is verdict
    assert same(gold, answer) is verdict


@pytest.mark.parametrize(("answer", "gold", "verdict"), table("remote_rm/answers/algebra", "values_at_points_decide"))
def test_values_at_points_decide_where_no_exact_form_is_known(answer, gold, verdict):
    assert same(answer, gold) is verdict
    assert same(gold, answer) is verdict


def test_parts_that_may_be_lost_in_rounding_prove_no_equality():
    # 1e-20 is less than the error of a float near 1.
    assert same(r"\sqrt[3]{2}+10^{-20}", r"\sqrt[3]{2}") is None
    assert same(r"2^{\frac{1}{2^{1000}}}", "1") is None
    assert same(r"\sqrt[3]{2}+10^{-5}", r"\sqrt[3]{2}") is False


def test_a_capital_tells_equality_only():
    assert same("X", "x") is None
    assert same("2A+B", "B+2A") is True


LEAVES = st.one_of(
    st.integers(0, 30).map(lambda n: (str(n), sympy.Integer(n))),
    st.sampled_from([("x", sympy.Symbol("x")), ("y", sympy.Symbol("y")), (r"\pi", sympy.pi), ("i", sympy.I)]),
    st.integers(0, 200).map(lambda n: (rf"\sqrt{{{n}}}", sympy.sqrt(n))),
)


def combined(children: st.SearchStrategy) -> st.SearchStrategy:
    pair = st.tuples(children, children)
    return st.one_of(
        pair.map(lambda p: (f"({p[0][0]}+{p[1][0]})", p[0][1] + p[1][1])),
        pair.map(lambda p: (f"({p[0][0]}-{p[1][0]})", p[0][1] - p[1][1])),
        pair.map(lambda p: (f"({p[0][0]})({p[1][0]})", p[0][1] * p[1][1])),
        pair.filter(lambda p: sympy.expand(p[1][1]) != 0).map(
            lambda p: (rf"\frac{{{p[0][0]}}}{{{p[1][0]}}}", p[0][1] / p[1][1])
        ),
        st.tuples(children, st.integers(0, 3)).map(lambda p: (f"({p[0][0]})^{p[1]}", p[0][1] ** p[1])),
    )


EXPRESSIONS = st.recursive(LEAVES, combined, max_leaves=6)


def difference_at_a_point(first: sympy.Expr, second: sympy.Expr) -> float:
    """How far they are apart at two transcendental-looking arguments, relative to their size."""
    at = {
        sympy.Symbol("x"): sympy.Float("0.7390851332151607", 60),
        sympy.Symbol("y"): sympy.Float("1.3247179572447", 60),
    }
    left, right = (complex(sympy.N(value.subs(at), 50)) for value in (first, second))
    return abs(left - right) / max(1.0, abs(left))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(first=EXPRESSIONS, second=EXPRESSIONS)
def test_it_agrees_with_sympy_on_random_expressions(first, second):
    verdict = same_algebra(first[0], second[0])
    if verdict is not None:
        assert verdict == (difference_at_a_point(first[1], second[1]) < 1e-10)
    total = same_algebra(f"({first[0]})+({second[0]})", f"({second[0]})+({first[0]})")
    assert total in (True, None)


@pytest.mark.parametrize(
    "text",
    [
        "(x+y+z+w)^{12}",
        "+".join(f"x_{{{n}}}" for n in range(40)),
        r"\frac{1}{1+" * 15 + "x" + "}" * 15,
        rf"\sqrt{{{999983 * 999979}}}",
    ],
)
def test_it_takes_milliseconds(text):
    seconds = []
    for _ in range(3):
        started = time.process_time()
        same_algebra(text, "x")
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1
