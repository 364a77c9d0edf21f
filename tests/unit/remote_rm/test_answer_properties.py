"""What must hold of every answer to every label, whatever it is: no case here has a verdict of its own."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from helpers.answers import (
    CATALOGUE,
    CHANGED,
    CHANGED_NUMBERS,
    HEDGED,
    KINDS,
    LEFT_OPEN,
    SECOND,
    Label,
    are_apart,
    denials,
    expect_none,
    expected,
    is_right,
    right_ones,
    rivals,
    said,
)
from helpers.tables import table
from hypothesis import assume, given, settings
from hypothesis import strategies as st

KIND = pytest.mark.parametrize("kind", KINDS)
# How many of the answers that the rules leave open are left to sympy, with their share of time, for each kind.
BY_SYMPY = pytest.mark.parametrize("by_sympy", [10, pytest.param(100, marks=[pytest.mark.full, pytest.mark.slow])])
generated = settings(max_examples=75, deadline=None, derandomize=True, database=None)

SOME_STRANGERS = 12
"""Labels of other kinds that each label is compared with in the short run."""
SOME_RIVALS = 2


def of_kind(kind: str) -> list[Label]:
    return [label for label in CATALOGUE if label.kind == kind]


def strangers(label: Label, count: int) -> list[Label]:
    others = [other for other in CATALOGUE if other.kind != label.kind]
    return random.Random(label.text).sample(others, count)


def test_the_catalogue_agrees_with_itself():
    texts = Counter(label.text for label in CATALOGUE)
    assert [text for text, count in texts.items() if count > 1] == []
    by_value: dict[str, set[str]] = {}
    for label in CATALOGUE:
        for text in label.spellings:
            by_value.setdefault(text, set()).add(label.value)
    assert {text: values for text, values in by_value.items() if len(values) > 1} == {}


@KIND
def test_every_spelling_of_a_label_is_right(kind: str):
    expect_none(
        (text, label.text) for label in of_kind(kind) for text in label.spellings if not is_right(text, label.text)
    )


@KIND
def test_a_label_is_right_for_another_where_a_teacher_says_so(kind: str):
    compared = [
        (answer, label) for label in of_kind(kind) for answer in [*of_kind(kind), *strangers(label, SOME_STRANGERS)]
    ]
    expect_none(
        (answer.text, label.text)
        for answer, label in compared
        if expected(answer, label) is not None and is_right(answer.text, label.text) != expected(answer, label)
    )


@pytest.mark.full
@pytest.mark.slow
@KIND
def test_every_spelling_is_right_for_no_label_that_is_apart(kind: str):
    expect_none(
        (text, label.text)
        for label in of_kind(kind)
        for answer in CATALOGUE
        if are_apart(answer, label)
        for text in answer.spellings
        # A unit may be missing.
        if is_right(text, label.text) and not (kind == "number" and text.startswith(f"{label.text} "))
    )


@KIND
def test_two_bare_spellings_are_right_for_each_other_or_not(kind: str):
    """But a rounded gold, one that names its base, and an option with its text accept what does not accept them, and
    `Option B` is an answer, no label.
    """
    bare = [
        (text, label)
        for label in of_kind(kind)
        if not label.accepts
        for text in label.bare if "ption" not in text
    ]  # fmt: skip
    pairs = [(one, other) for place, (one, _) in enumerate(bare) for other, _ in bare[place + 1 :]]
    some = pairs if len(pairs) <= 1500 else random.Random(kind).sample(pairs, 1500)
    expect_none((one, other) for one, other in some if is_right(one, other) != is_right(other, one))


@KIND
def test_an_answer_stays_right_in_every_sentence_and_mark_up_that_says_it(kind: str):
    expect_none(
        (text, label.text) for label in of_kind(kind) for text in said(label) if not is_right(text, label.text)
    )


@BY_SYMPY
@KIND
def test_an_answer_that_is_denied_doubted_or_bounded_is_wrong(kind: str, by_sympy: int):
    denied = [(frame.format(label.text), label.text) for label in of_kind(kind) for frame in denials(label)]
    expect_none(right_ones(denied, by_sympy=by_sympy))


@BY_SYMPY
@KIND
def test_an_answer_that_is_left_open_is_wrong(kind: str, by_sympy: int):
    left_open = [(frame.format(label.text), label.text) for label in of_kind(kind) for frame in LEFT_OPEN]
    expect_none(right_ones(left_open, by_sympy=by_sympy))


@BY_SYMPY
@KIND
def test_two_answers_are_right_for_neither(kind: str, by_sympy: int):
    hedged = [
        (frame.format(label.text, other.text), gold.text)
        for label in of_kind(kind)
        for other in rivals(label)[:SOME_RIVALS]
        for frame in HEDGED
        for gold in (label, other)
        # An equation may follow from the one above it.
        if kind != "equation" or "\n" not in frame
    ]
    expect_none(right_ones(hedged, by_sympy=by_sympy))


@BY_SYMPY
@KIND
def test_a_second_answer_is_right_for_at_most_one(kind: str, by_sympy: int):
    second = {
        (frame.format(label.text, other.text), label.text): other.text
        for label in of_kind(kind)
        for other in rivals(label)[:SOME_RIVALS]
        for frame in SECOND
    }
    right = right_ones(second, by_sympy=by_sympy)
    expect_none(
        (answer, f"{label} and {other}") for answer, label in right if is_right(answer, other := second[answer, label])
    )


@pytest.mark.parametrize("number", CHANGED_NUMBERS)
def test_a_word_that_makes_another_number_makes_it_wrong(number: str):
    expect_none((answer, number) for frame in CHANGED if is_right(answer := frame.format(number), number))


small = st.integers(0, 99)
natural = st.integers(1, 10**6)


@generated
@given(number=st.integers(-(10**9), 10**9), by=st.integers(1, 1000))
def test_a_whole_number_is_right_in_every_notation_and_its_neighbours_are_wrong(number: int, by: int):
    full_width = str(number).translate({ord("0") + digit: ord("０") + digit for digit in range(10)})
    for written in (
        f"{number:,}",
        f"{number}.0",
        f"${number}$",
        f"**{number}**",
        full_width,
        f"The answer is {number:,}.",
    ):
        assert is_right(written, str(number)), written
        assert not is_right(written, str(number + by)), written
        assert not is_right(written, str(number * 10 + 1)), written


@generated
@given(top=natural, bottom=natural, times=st.integers(2, 9))
def test_a_fraction_is_right_in_every_notation_and_upside_down_it_is_wrong(top: int, bottom: int, times: int):
    assume(top != bottom)
    value, label = Fraction(top, bottom), f"{top}/{bottom}"
    for written in (rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top * times}}}{{{bottom * times}}}", str(value)):
        assert is_right(written, label), written
        assert is_right(label, written), written
    assert not is_right(f"{bottom}/{top}", label)
    assert not is_right(rf"\frac{{{top + 1}}}{{{bottom}}}", label)


@generated
@given(cents=st.integers(1, 10**7))
def test_money_is_right_with_and_without_its_sign_and_wrong_in_another_currency(cents: int):
    amount = f"{cents // 100:,}.{cents % 100:02}"
    label = rf"\${amount}"
    for written in (f"${amount}", amount, f"{amount} dollars", amount.replace(",", "")):
        assert is_right(written, label), written
    for written in (f"€{amount}", f"{amount}€", f"{amount} euros", f"£{amount}", f"{amount} cents", f"{amount}元"):
        assert not is_right(written, label), written


CONVERTED = tuple(table("remote_rm/answer_properties", "converted"))


@generated
@given(number=st.integers(1, 10**4), conversion=st.sampled_from(CONVERTED))
def test_a_quantity_is_right_in_a_unit_of_the_same_measure_and_in_no_other(
    number: int, conversion: tuple[str, int, str]
):
    large, factor, small_unit = conversion
    label, converted = f"{number} {large}", f"{number * factor} {small_unit}"
    assert is_right(converted, label)
    assert is_right(label, converted)
    assert not is_right(f"{number} {small_unit}", label)
    assert not is_right(f"{number * factor} {large}", converted)


@generated
@given(low=small, width=st.integers(1, 40), shift=st.integers(1, 60))
def test_a_range_is_neither_its_difference_nor_another_range(low: int, width: int, shift: int):
    label = f"{low}-{low + width}"
    assert is_right(f"{low}–{low + width}", label)
    for other in (f"{low + shift}-{low + width + shift}", str(-width), str(width), str(low), str(low + width)):
        assert not is_right(other, label), other
        assert not is_right(label, other), other


@generated
@given(hour=st.integers(1, 12), minute=st.integers(0, 59), other=st.tuples(st.integers(1, 12), st.integers(0, 59)))
def test_a_time_of_day_is_no_other_time(hour: int, minute: int, other: tuple[int, int]):
    assume((hour, minute) != other)
    label, wrong = f"{hour}:{minute:02}", f"{other[0]}:{other[1]:02}"
    assert not is_right(wrong, label)
    assert not is_right(f"{wrong} PM", f"{label} PM")
    assert not is_right(f"{label} AM", f"{label} PM")
    in_the_evening = f"{hour % 12 + 12}:{minute:02}"
    assert is_right(in_the_evening, f"{label} PM")


@generated
@given(year=st.integers(1900, 2030), month=st.integers(1, 12), day=st.integers(1, 28))
def test_a_date_is_not_worked_out(year: int, month: int, day: int):
    label = f"{year}-{month:02}-{day:02}"
    assume(month != day)
    for other in (
        str(year - month - day),
        f"{year}-{day:02}-{month:02}",
        f"{year + 1}-{month + 1:02}-{day:02}",
        str(year),
    ):
        assert not is_right(other, label), other
        assert not is_right(label, other), other


letters = st.lists(st.sampled_from("ABCDGHKNOPV"), min_size=1, max_size=3, unique=True)
digits = st.lists(st.sampled_from("23456789"), min_size=1, max_size=2, unique=True)


@generated
@given(parts=st.tuples(letters, digits).map(lambda lists: lists[0] + lists[1]), data=st.data())
def test_a_code_is_not_its_letters_and_digits_in_another_order(parts: list[str], data: st.DataObject):
    code, other = "".join(parts), "".join(data.draw(st.permutations(parts)))
    assume(code != other)
    assert is_right(code, code)
    assert not is_right(other, code), (other, code)


@generated
@given(label=st.sampled_from(CATALOGUE), other=st.sampled_from(CATALOGUE), frame=st.sampled_from([*HEDGED, *SECOND]))
def test_one_sentence_is_never_right_for_two_labels(label: Label, other: Label, frame: str):
    assume(are_apart(label, other))
    answer = frame.format(label.text, other.text)
    assert not (is_right(answer, label.text) and is_right(answer, other.text)), answer
