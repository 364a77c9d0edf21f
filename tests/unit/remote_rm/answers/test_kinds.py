"""Kinds of values: what a text is, what is compared with what, and which values are the same."""

import ast
import itertools
import time
from pathlib import Path

import pytest
from helpers.tables import table

from remote_rm.answers import accuracy
from remote_rm.answers.accuracy import matches, quick_match
from remote_rm.answers.comparison import Rules, match_value, work_out
from remote_rm.answers.notation import Kind, are_compared, kind_of
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.reading import normalize
from remote_rm.answers.units import canonical_unit, changes_number, conversion, counted_thing

pytestmark = pytest.mark.unit

RULES = Rules(undecided=work_out, ordered=False)


def same(answer: str, gold: str) -> bool | None:
    return match_value(normalize(answer), normalize(gold), RULES)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("5", Kind.NUMBER), ("three quarters", Kind.NUMBER), ("3 cm", Kind.QUANTITY), ("50%", Kind.QUANTITY), (r"2\sqrt{3} cm", Kind.QUANTITY),
        ("5€", Kind.MONEY), ("3元5角", Kind.MONEY), (r"\sqrt{2}", Kind.EXPRESSION), ("2x", Kind.EXPRESSION), ("15+1", Kind.COMPUTATION),
        (r"\frac12+\frac14", Kind.COMPUTATION), ("3(4)", Kind.COMPUTATION), (r"1-\frac{1}{2020}", Kind.EXPRESSION), ("x=5", Kind.EQUATION),
        ("[1, 2)", Kind.INTERVAL), ("x>3", Kind.INTERVAL), (r"\{1, 2\}", Kind.SET), ("(1, 2)", Kind.TUPLE), ("1, 2", Kind.LIST), ("1 or 2", Kind.LIST),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", Kind.MATRIX), ("north", Kind.WORD), ("yes", Kind.YES_NO), ("错误", Kind.YES_NO),
        ("no solution", Kind.NO_VALUE), ("2024-01-05", Kind.DATE), ("5 January 2024", Kind.DATE), ("2024-13-05", Kind.TELEPHONE),
        ("2:30", Kind.CLOCK), ("24:00", Kind.CLOCK), ("25:00", Kind.RATIO), ("2:60", Kind.RATIO), ("3:4", Kind.RATIO), ("3 to 4", Kind.RATIO),
        ("10 to 20", Kind.RANGE), ("3-2", Kind.RANGE), ("1990–2000", Kind.RANGE), ("between 3 and 4", Kind.RANGE), ("-10", Kind.NUMBER),
        ("555-1234", Kind.RANGE), ("555-123-4567", Kind.TELEPHONE), ("A4", Kind.CODE), ("CO_2", Kind.CODE), ("x_2", Kind.EXPRESSION),
        ("4A", Kind.EXPRESSION), ("1e5", Kind.NUMBER), ("101_2", Kind.BASED), (r"3 \pmod 7", Kind.RESIDUE),
    ],
)  # fmt: skip
def test_the_form_of_a_text_tells_its_kind(text, kind):
    assert kind_of(normalize(text)) is kind


def test_only_kinds_of_the_table_are_compared_and_alike_in_both_directions():
    for one, other in itertools.product(Kind, Kind):
        assert are_compared(one, other) == are_compared(other, one)
    assert are_compared(Kind.NUMBER, Kind.MONEY)
    assert are_compared(Kind.EQUATION, Kind.CLOCK)
    assert not are_compared(Kind.CLOCK, Kind.RATIO)
    assert not are_compared(Kind.RANGE, Kind.NUMBER)
    assert not are_compared(Kind.COMPUTATION, Kind.NUMBER)
    assert not are_compared(Kind.CODE, Kind.QUANTITY)


@pytest.mark.parametrize(
    ("one", "other"),
    table("remote_rm/answers/kinds", "the_same_value_in_two_forms"),
)  # fmt: skip
def test_the_same_value_in_two_forms(one, other):
    assert matches(one, other)
    assert same(one, other) is True
    if kind_of(normalize(one)) is not Kind.WORD:
        assert same(other, one) is True


@pytest.mark.parametrize(
    ("one", "other"),
    table("remote_rm/answers/kinds", "different_values_that_look_alike"),
)  # fmt: skip
def test_different_values_that_look_alike(one, other):
    assert same(one, other) is not True
    assert same(other, one) is not True
    assert quick_match(other, one) is not True or " " in other  # What a sentence states is another room's.


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"),
    [
        ("3.14159", "3.14", True), ("3.145", "3.14", False), ("3.145", "3.15", True), ("-3.145", "-3.15", True), ("1/3", "0.33", True), ("33.3%", "0.33", True),
        ("0.01", "0.010", True), ("0.0149", "0.01", False), ("0.005", "0.01", False), ("0.0104", "0.010", True), ("0.3", "0.33", False),
        # What is left out: the second direction has more in it than the first.
        ("101", "101_2", True), ("101_2", "101", False), ("B", "(B) 12", True), ("B. 13", "(B) 12", False), ("B. 12", "(B) 12", True),
        ("3x=2x", "2x", False), ("y=2x", "2x", True), ("3+4=7", "7", True), ("0=7", "7", False), ("m+n=12", "12", True), ("3x+4y=12", "12", False),
        (r"\frac{5}{8}=0.63", "0.63", True), ("0 -1", "-1", False), ("ix=2, y=3", "x=2, y=3", False), ("/4", "4", False), ("Yes, it is not", "Yes", False), ("1%", "1", True), ("1", "1%", True), ("0.5", "0.5%", False),
    ],
)  # fmt: skip
def test_where_the_directions_differ(answer, gold, is_right):
    assert same(answer, gold) is is_right


@pytest.mark.parametrize(
    ("written", "thing"),
    [
        ("apples", "apple"), ("red apples", "red apple"), ("boxes", "box"), ("people", "people"), ("units of blood", "unit of blood"), ("in total", ""),
        ("students each", "student"), ("个苹果", "苹果"), ("个", ""), ("wrong", None), ("red", None), ("halves", None), ("two apples", None), ("tens", None),
        ("glass", None), ("always", None), ("of them", None), ("out of 6", None), ("万", None), ("半", None),
    ],
)  # fmt: skip
def test_what_is_counted(written, thing):
    assert counted_thing(written) == thing


def test_words_that_change_a_number():
    assert all(map(changes_number, ["halves", "below zero", "divided by two", "or six", "is wrong", "seventeenths"]))
    assert not any(map(changes_number, ["apples", "months", "cm", "deaths", "square meters"]))


@pytest.mark.parametrize(
    ("written", "unit"),
    [("km", "km"), ("Kilometers", "km"), ("千米", "km"), ("square inches", "in^2"), ("平方分米", "dm^2"), ("m/s^{2}", "m/s^2"), ("meters per second", "m/s"),
     ("cubic cm", "cm^3"), ("mph", "mi/h"), (r"^\circ C", "celsius"), ("years old", "yr"), ("MHz", "MHz"), ("wrong", None), ("pm", None), ("us", None)],
)  # fmt: skip
def test_units_have_one_canonical_spelling(written, unit):
    assert canonical_unit(written) == unit


def test_prefixes_and_powers_are_converted():
    assert conversion("kJ", into="J") == 1000
    assert conversion("μm", into="m") == 1 / conversion("m", into="μm")
    assert conversion("L", into="cm^3") == 1000
    assert conversion("kWh", into="J") == 3_600_000
    assert conversion("km/h", into="m/s") * 18 == 5
    assert conversion("yr", into="mo") == 12
    assert conversion("yr", into="d") is None
    assert conversion("celsius", into="fahrenheit") is None
    assert conversion("euro", into="dollar") is None


@pytest.mark.parametrize(
    "text",
    table("remote_rm/answers/kinds", "what_is_no_number_in_words"),
)
def test_what_is_no_number_in_words(text):
    assert parse_quantity(text) is None


@pytest.mark.parametrize(
    "piece", ["1-", "1:", "1 to ", "A1", "_1", "一", "百分之", "1月", "half ", "one ", "1 h ", "平方", "(1)", "+1 ", "-1-", "1.2.", "mod ", "in the ", "5'", "€", "~1"]
)  # fmt: skip
def test_a_long_text_of_any_notation_is_read_in_milliseconds(piece):
    text = normalize((piece * 1000)[:1000])
    started = time.process_time()
    kind_of.__wrapped__(text)
    match_value(text, "1", RULES)
    match_value("1", text, RULES)
    assert time.process_time() - started < 0.25


def test_regular_expressions_are_only_in_the_lexer():
    room = Path(accuracy.__file__).parent
    using = {
        str(path.relative_to(room))
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "re" in {getattr(node, "module", None), *(name.name for name in node.names)}
    }
    assert using == {f"lexer/{name}.py" for name in ("__init__", "languages", "latex", "values")}
