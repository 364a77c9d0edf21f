"""What sentences state, numbers in words, and units behind values."""

from fractions import Fraction

import pytest

from remote_rm.answers.accuracy import matches
from remote_rm.answers.extraction import final_answer
from remote_rm.answers.quantity import parse_number_words
from remote_rm.answers.statement import clause_of, read, unit_in_prose, without_remark
from remote_rm.answers.units import conversion

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The function is even.", "even"),
        ("We count. The roots are 2 and 3.", "2 and 3"),
        ("All $x$ such that $x < -1$", "$x < -1$"),
        (r"\text{The triangle is isosceles}", "isosceles"),
        ("The minimum is $5$, achieved when $x=2$.", "$5$"),
        ("Option C is correct.", "C"),
        ("Final answer: 7", "7"),
        ("The ratio is 5 : 3", "5 : 3"),
        ("The answer is 42.", "42"),
        ("The total is 3.5", "3.5"),
        ("It must be $x^2$ then", "x^2"),
        ("It must be 3, which is 3", "3"),
        ("It takes 2 minutes.", "2 minutes"),
        ("It must be 3 or 5", "3 or 5"),
        ("x is 5", "5"),
        ("in 2010", "2010"),
        ("It's red.", "red"),
        ("48 tiles are needed.", "48 tiles"),
        ("There are **42** ways.", "42 ways"),
        ("The width is 5, so the area is 30.", "30"),
        ("The area is 30, because the width is 5.", "30"),
        ("The answer is 5, not 6.", "5"),
        ("The value of x when y is 3 is 7.", "7"),
        ("James runs 3 × 60 × 3 = 540 meters a week.", "540 meters"),
        ("The value rose from 1990 to 2000.", "1990 to 2000"),
        ("The answer is 5. I hope it is correct.", "5"),
        ("The answer is 5. Wait, it is 6.", "6"),
        ("The answer is (C) because the angle is 30 degrees.", "(C)"),
        ("Evelyn is the fastest.", "Evelyn"),
        ("一共有12个苹果。", "12"),
        ("答案是42。", "42"),
        ("所以答案应该是B。", "B"),
    ],
)
def test_one_value_is_read_from_a_sentence(text, value):
    assert read(text).value == value


@pytest.mark.parametrize(
    "text",
    [
        "It is not a square.",
        "It isn't 5.",
        "It can't be 5.",
        "anything but 5",
        "I doubt it is 5.",
        "Maybe it is 5.",
        "more than five",
        "at least 5 apples",
        "either 5 or north",
        "The answer is 5. Or maybe 6.",
        "The answer is 5. Alternatively, 6.",
        "Yes is no",
        "True is false",
        "Left is right",
        "5 is 6",
        "Yes is 5 for this, is 6 for that, 0 = 7 is no",
        "The angle A is 30 and the angle B is 60.",
        "No idea at all",
        "可能是5或6",
        "不是5",
        "至少5个",
    ],
)
def test_denials_hedges_bounds_and_two_answers_state_no_value(text):
    assert read(text).value == ""


@pytest.mark.parametrize(
    ("answer", "labels"),
    [
        ("Yes is no", ("Yes", "No")),
        ("True is false", ("True", "False")),
        ("Left is right", ("left", "right")),
        (r"\boxed{\text{Left is right}}", ("left", "right")),
        ("Yes is 5 for this, is 6 for that, 0 = 7 is no", ("Yes", "No", "5", "6", "7")),
        ("It can't be 5.", ("5",)),
        ("anything but 5", ("5",)),
        ("I doubt it is 5.", ("5",)),
        ("more than five", ("5",)),
        ("The answer is 5. Or maybe 6.", ("5", "6")),
        (r"5 \approx 6", ("5", "6")),
        ("A. B. C. D.", ("A", "B", "C", "D")),
        ("(A) 3 or (B) 4", ("A", "B", "3", "4")),
        ("B. is wrong, C is right", ("B",)),
        ("可能是5或6", ("5", "6")),
    ],
)
def test_what_states_two_or_denies_is_right_for_none(answer, labels):
    for response in (f"<answer>{answer}</answer>", answer, f"We think.\nThe answer is: {answer}"):
        stated = final_answer(response) or ""
        assert [label for label in labels if matches(stated, label)] == []


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("The answer is (C) because the angle is 30 degrees.", "C"),
        ("C is correct.", "C"),
        ("I choose C.", "C"),
        ("C (30°)", "C"),
        ("[C]", "C"),
        ("选C", "C"),
        ("答案是B", "B"),
        ("故选：D。", "D"),
        ("It should be C.", "C"),
        ("B. is wrong, C is right", "C"),
        ("The answer is:\n\\[\nx = 5\n\\]", "5"),
        ("The answer is:\n\n$$\n\\frac{1}{2}\n$$", r"\frac{1}{2}"),
        ("**Final Answer**\n\n12 cm", "12 cm"),
        ("x is 5", "5"),
        ("in 2010", "2010"),
        ("It's red.", "red"),
        ("The table is made of wood.", "wood"),
        ('The sign says "Stop".', "STOP"),
        ("The chair is on the right.", "right"),
        ("The legend has:\n\n1. Red\n2. Blue\n3. Green", "red, blue, green"),
        ("**Yes.** The sum (45) is greater than that of 2014 (39).", "Yes"),
        ("No - the median is 27, not 30.", "No"),
        ("**A. Ohio**\n\nOhio lies farthest north of the four.", "A"),
        ("答：一共有12个苹果。", "12"),
    ],
)
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


def test_units_of_one_measure_are_converted():
    assert conversion("cm", into="m") == Fraction(1, 100)
    assert conversion("cm^2", into="m^2") == Fraction(1, 10_000)
    assert conversion("km/h", into="m/s") == Fraction(1000, 3600)
    assert conversion("kg", into="m") is None
    assert conversion("m", into="m^2") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("five", 5), ("Zero", 0), ("twenty-one", 21), ("two hundred and five", 205), ("one million two hundred thousand", 1_200_000),
        ("five six", None), ("twenty ten", None), ("hundred", None), ("the five", None), ("north", None), ("", None),
    ],
)  # fmt: skip
def test_numbers_in_words(text, number):
    assert parse_number_words(text) == number
