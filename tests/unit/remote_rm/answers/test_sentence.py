"""What sentences say, numbers in words, and units behind values."""

from fractions import Fraction

import pytest

from remote_rm.answers.quantity import parse_number_words
from remote_rm.answers.sentence import bold_end, complement, complements, subject, unit_in_prose, without_remark
from remote_rm.answers.units import conversion

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The function is even.", "even"),
        ("We count. The roots are 2 and 3.", "2 and 3"),
        ("All $x$ such that $x < -1$", "$x < -1$"),
        (r"\text{The triangle is isosceles}", "isosceles"),
        ("The minimum is $5$, achieved when $x=2$.", "$5$"),
        ("Option C is correct.", "C"),
        ("Final answer: 7", "7"),
        ("The ratio is 5 : 3", "5 : 3"),
        ("It is not a square.", None),
        ("It isn't 5.", None),
        ("42", None),
    ],
)
def test_what_stands_behind_the_verb(text, said):
    assert complement(text) == said


def test_every_verb_is_a_place_to_read_from():
    assert complements("The answer is n is odd.") == ["odd", "n is odd"]


def test_bold_words_and_remarks():
    assert bold_end("It will be a **Friday**.") == "Friday"
    assert bold_end("It will be a Friday.") is None
    assert without_remark("6, 8, 10 (in increasing order)") == "6, 8, 10"
    assert without_remark("3 (or 5)") == "3 (or 5)"
    assert without_remark("f (x)") == "f (x)"


@pytest.mark.parametrize(
    ("text", "unit"),
    [("12 cm long", "cm"), (r"12\text{ cm}", "cm"), ("12$ cm", "cm"), ("12 in the end", ""), ("12 m.", "m"), ("12 m long", ""), ("12 apples", "")],
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


def test_the_end_of_a_chain_of_numbers_and_the_subject_of_a_sentence():
    assert complements("James runs 3 × 60 × 3 = 540 meters a week.") == ["540 meters"]
    assert complements("The curve is x^2 = 4") == ["x^2 = 4"]
    assert complement("The triangle is an isosceles triangle.") == "isosceles triangle"
    assert complements("The triangle is an isosceles triangle.")[1] == "isosceles"
    assert subject("Evelyn has the greatest average speed.") == "Evelyn"
    assert subject("Evelyn or Bob has the greatest average speed.") == ""
