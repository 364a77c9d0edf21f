"""What sentences state, numbers in words, and units behind values."""

import pytest
from helpers.tables import frozen, table

from remote_rm.answers.accuracy import matches
from remote_rm.answers.extraction import final_answer
from remote_rm.answers.quantity import parse_number_words
from remote_rm.answers.statement import clause_of, read, unit_in_prose, without_remark


@pytest.mark.parametrize(("text", "value"), table("remote_rm/answers/statement", "one_value_is_read_from_a_sentence"))
def test_one_value_is_read_from_a_sentence(text, value):
    assert read(text).value == value


@pytest.mark.parametrize(
    "text", table("remote_rm/answers/statement", "denials_hedges_bounds_and_two_answers_state_no_value")
)
def test_denials_hedges_bounds_and_two_answers_state_no_value(text):
    assert read(text).value == ""


@pytest.mark.parametrize(
    ("answer", "labels"), frozen("remote_rm/answers/statement", "what_states_two_or_denies_is_right_for_none")
)
def test_what_states_two_or_denies_is_right_for_none(answer, labels):
    for response in (f"<answer>{answer}</answer>", answer, f"We think.\nThe answer is: {answer}"):
        stated = final_answer(response) or ""
        assert [label for label in labels if matches(stated, label)] == []


@pytest.mark.parametrize(("answer", "label"), table("remote_rm/answers/statement", "what_a_teacher_accepts"))
def test_what_a_teacher_accepts(answer, label):
    assert matches(final_answer(answer) or "", label)
    assert matches(final_answer(f"<think>so</think><answer>{answer}</answer>") or "", label)


def test_phrases_go_from_the_whole_clause_to_its_end():
    assert read("The answer is n is odd.").phrases[0] == "n is odd"
    assert "isosceles" in read("The triangle is an isosceles triangle.").phrases
    assert "Friday" in read("It will be a **Friday**.").phrases
    assert "Evelyn" in read("Evelyn has the greatest average speed.").phrases
    assert read("Evelyn or Bob has the greatest average speed.").value == ""


def test_the_clause_of_several_sentences():
    assert clause_of("The answer is 5. I hope it is correct.") == "5"
    assert clause_of("The answer is 5. The answer is 6.") is None
    assert clause_of("It is 5. Or it is 6.") is None


def test_remarks():
    assert without_remark("6, 8, 10 (in increasing order)") == "6, 8, 10"
    assert without_remark("3 (or 5)") == "3 (or 5)"
    assert without_remark("f (x)") == "f (x)"


@pytest.mark.parametrize(
    ("text", "unit"),
    [("12 cm long", "cm"), (r"12\text{ cm}", "cm"), ("12$ cm", "cm"), ("12 in the end", ""), ("12 m.", "m"), ("12 m long", "m"), ("12 a day", ""), ("12 apples", "")],
)  # fmt: skip
def test_a_unit_right_behind_a_value(text, unit):
    assert unit_in_prose(text, 2) == unit


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("five", 5), ("Zero", 0), ("twenty-one", 21), ("two hundred and five", 205), ("one million two hundred thousand", 1_200_000),
        ("five six", None), ("twenty ten", None), ("hundred", None), ("the five", None), ("north", None), ("", None),
    ],
)  # fmt: skip
def test_numbers_in_words(text, number):
    assert parse_number_words(text) == number
