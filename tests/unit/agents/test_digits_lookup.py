import pytest
from helpers.episodes import play_episode, row_of, texts_of
from helpers.verifiers import LARGE, pieced
from hypothesis import given, settings

from lmm_r1.agents.digits_lookup import DigitsLookup, look_up, read_cell
from lmm_r1.errors import UserError

TABLE = [[1, 2, 3], [4, 5, 6]]
ROW = row_of("What is the sum of the digits in row 2?", answer="15", table=TABLE)


def call(text):
    return f"<think>look</think><lookup>{text}</lookup>"


def test_a_cell_is_looked_up_by_row_and_column_from_1():
    assert look_up(2, 3, ROW) == "6"
    for row, column in [(0, 1), (3, 1), (1, 4), (1, -1)]:
        with pytest.raises(ValueError, match=f"no row {row}, column {column}: the table has 2 rows and 3 columns"):
            look_up(row, column, ROW)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("2, 3", (2, 3)),
        ("row 2, column 3", (2, 3)),
        ("column 3, row 2", (2, 3)),
        ('{"column": 3, "row": 2}', (2, 3)),
        ("Row=2 Col=3", (2, 3)),
        ("(2, -3)", (2, -3)),
    ],
)
def test_a_call_names_its_cell_in_many_ways(text, cell):
    assert read_cell(text) == cell


def test_digits_are_looked_up_until_there_is_an_answer():
    turns = [call("2, 1"), call("row 2, column 2"), call('{"row": 2, "column": 3}'), "<answer>15</answer>"]
    played = play_episode(DigitsLookup(), ROW, *turns)
    assert [texts_of(answered.shown) for answered in played.answers] == [
        "Row 2, column 1: 4",
        "Row 2, column 2: 5",
        "Row 2, column 3: 6",
        "",
    ]
    assert played.rewards == pytest.approx({"accuracy": 1.0, "tool_execution": 1.0})
    assert (played.counts["tool_calls"], played.counts["malformed_calls"]) == (3, 0)


def test_half_of_the_calls_carried_out_is_half_the_part():
    played = play_episode(DigitsLookup(), ROW, call("9, 9"), call("1, 1"), "<answer>3</answer>")
    assert played.rewards == pytest.approx({"accuracy": 0.0, "tool_execution": 0.5})
    assert played.counts["malformed_calls"] == 1


def test_an_answer_without_any_call_is_judged_too():
    played = play_episode(DigitsLookup(), ROW, "<answer>15</answer>")
    assert played.rewards == {"accuracy": 1.0, "tool_execution": 0.0}
    assert played.answers[0].is_over


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3, 1", "there is no row 3, column 1: the table has 2 rows and 3 columns"),
        ("the first", "names one row and one column, as in row 2, column 3, and 0 numbers were found"),
        ("1 2 3", "and 3 numbers were found"),
        ("1.5, 2", "whole numbers, and 1.5 and 2 were found"),
        ("NaN, 1", "and 1 numbers were found"),
    ],
)
def test_a_call_that_cannot_be_carried_out_says_why(text, said):
    (answered,) = play_episode(DigitsLookup(), ROW, call(text)).answers
    assert said in texts_of(answered.shown)
    assert answered.counts == {"tool_calls": 1, "malformed_calls": 1}
    (outcome,) = answered.calls
    assert (outcome.tool, outcome.outcome) == ("lookup", "malformed")
    assert said in outcome.problem


def test_the_policy_is_told_how_to_look_up():
    assert "<lookup>row 2, column 3</lookup>" in texts_of(DigitsLookup().shown_row(ROW).messages[0].parts)


@pytest.mark.parametrize("table", [None, "123", [], [[1], [2, 3]], [["1"]], [[]], [1, 2], [[True]]])
def test_a_row_without_a_table_is_an_error_with_its_place(table):
    with pytest.raises(UserError, match='rows.jsonl, line 3: the column "table" must be a list of rows'):
        DigitsLookup().begin(row_of(answer="1", table=table), seed=0)


@settings(max_examples=500, deadline=None)
@given(text=pieced)
def test_whatever_is_called_is_answered(text):
    played = play_episode(DigitsLookup(), ROW, call(text))
    assert all(0.0 <= value <= 1.0 for value in played.rewards.values())


@pytest.mark.parametrize("text", LARGE, ids=lambda text: text[:12])
def test_a_megabyte_of_anything_is_answered_shortly(text):
    (answered,) = play_episode(DigitsLookup(), ROW, call(text)).answers
    assert len(texts_of(answered.shown)) < 300


def test_a_tool_was_used_where_a_cell_was_looked_up():
    environment = DigitsLookup()
    assert environment.call_tags == ("lookup",)
    used = [environment.derived({"tool_calls": calls, "malformed_calls": 1.0}) for calls in (1.0, 2.0)]
    assert used == [{"used_tool": 0.0}, {"used_tool": 1.0}]
