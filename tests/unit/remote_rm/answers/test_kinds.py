"""Kinds of values: what a text is, what is compared with what, and which values are the same."""

import ast
import itertools
import time
from pathlib import Path

import pytest
from helpers.tables import table

from remote_rm import registry
from remote_rm.answers.accuracy import matches, quick_match
from remote_rm.answers.comparison import match_value, work_out
from remote_rm.answers.lexer import Form, Latex, Number, Token, Unit
from remote_rm.answers.notation import Kind, are_compared, kind_of
from remote_rm.answers.quantity import canonical_unit, changes_number, conversion, counted_thing, parse_quantity
from remote_rm.answers.reading import normalize


def same(answer: str, gold: str) -> bool | None:
    return match_value(normalize(answer), normalize(gold), work_out)


@pytest.mark.parametrize(("text", "kind"), table("remote_rm/answers/kinds", "kinds_by_form"))
def test_the_form_of_a_text_tells_its_kind(text, kind):
    assert kind_of(normalize(text)) is Kind[kind]


def test_only_kinds_of_the_table_are_compared_and_alike_in_both_directions():
    for one, other in itertools.product(Kind, Kind):
        assert are_compared(one, other) == are_compared(other, one)
    assert are_compared(Kind.NUMBER, Kind.MONEY)
    assert are_compared(Kind.EQUATION, Kind.CLOCK)
    assert not are_compared(Kind.CLOCK, Kind.RATIO)
    assert not are_compared(Kind.RANGE, Kind.NUMBER)
    assert not are_compared(Kind.COMPUTATION, Kind.NUMBER)
    assert not are_compared(Kind.CODE, Kind.QUANTITY)


@pytest.mark.parametrize(("one", "other"), table("remote_rm/answers/kinds", "the_same_value_in_two_forms"))  # fmt: skip
def test_the_same_value_in_two_forms(one, other):
    assert matches(one, other)
    assert same(one, other) is True
    if kind_of(normalize(one)) is not Kind.WORD:
        assert same(other, one) is True


@pytest.mark.parametrize(("one", "other"), table("remote_rm/answers/kinds", "different_values_that_look_alike"))  # fmt: skip
def test_different_values_that_look_alike(one, other):
    assert same(one, other) is not True
    assert same(other, one) is not True
    assert quick_match(other, one) is not True or " " in other  # What a sentence states is another room's.


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"), table("remote_rm/answers/kinds", "where_the_directions_differ")
)
def test_where_the_directions_differ(answer, gold, is_right):
    assert same(answer, gold) is is_right


@pytest.mark.parametrize(("written", "thing"), table("remote_rm/answers/kinds", "what_is_counted"))
def test_what_is_counted(written, thing):
    assert counted_thing(written) == thing


def test_words_that_change_a_number():
    assert all(map(changes_number, ["halves", "below zero", "divided by two", "or six", "is wrong", "seventeenths"]))
    assert not any(map(changes_number, ["apples", "months", "cm", "deaths", "square meters"]))


@pytest.mark.parametrize(("written", "unit"), table("remote_rm/answers/kinds", "canonical_units"))
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


@pytest.mark.parametrize("text", table("remote_rm/answers/kinds", "what_is_no_number_in_words"))
def test_what_is_no_number_in_words(text):
    assert parse_quantity(text) is None


@pytest.mark.parametrize(
    "piece", ["1-", "1:", "1 to ", "A1", "_1", "一", "百分之", "1月", "half ", "one ", "1 h ", "平方", "(1)", "+1 ", "-1-", "1.2.", "mod ", "in the ", "5'", "€", "~1"]
)  # fmt: skip
def test_a_long_text_of_any_notation_is_read_in_milliseconds(piece):
    text = normalize((piece * 1000)[:1000])
    started = time.process_time()
    kind_of.__wrapped__(text)
    match_value(text, "1", work_out)
    match_value("1", text, work_out)
    assert time.process_time() - started < 0.25


def test_every_pattern_of_the_tables_is_used_and_every_used_one_is_there():
    tables = {"Token": Token, "Latex": Latex, "Unit": Unit, "Number": Number, "Form": Form}
    used = {
        (node.value.id, node.attr)
        for path in Path(registry.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in tables
    }
    assert used == {(table, name) for table, patterns in tables.items() for name in vars(patterns)}
    with pytest.raises(AttributeError, match="no table of answers/lexer has the pattern VERBS"):
        _ = Token.VERBS
