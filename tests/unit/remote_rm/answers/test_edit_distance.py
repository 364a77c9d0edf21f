import time

import pytest
from helpers.tables import table
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.edit_distance_verifier import edit_distance, similarity

pytestmark = pytest.mark.unit
generated = settings(max_examples=200, deadline=None, derandomize=True, database=None)
short = st.text(alphabet="abé", max_size=9)


def by_the_definition(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for place, character in enumerate(one):
        above, row = row, [place + 1]
        for column, compared in enumerate(other):
            row.append(min(row[-1] + 1, above[column + 1] + 1, above[column] + (character != compared)))
    return row[-1]


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    table("remote_rm/answers/edit_distance", "known_distances"),
)
def test_known_distances(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@generated
@given(one=short, other=short)
def test_it_is_what_the_definition_gives(one: str, other: str):
    assert edit_distance(one, other) == by_the_definition(one, other)


def test_texts_of_more_bits_than_a_word():
    one, other = "ab" * 100, "ba" * 100 + "c"
    assert edit_distance(one, other) == by_the_definition(one, other) == 2


def test_likeness_is_a_share_of_the_longer_text():
    assert similarity("kitten", "sitting") == pytest.approx(4 / 7)
    assert similarity("abcd", "abcx") == 0.75
    assert similarity("ab", "") == 0.0
    assert similarity("", "") == 1.0


def test_ten_thousand_characters_take_a_fraction_of_a_second():
    started = time.process_time()
    assert edit_distance("ab" * 5000, "ba" * 5000) == 2
    assert time.process_time() - started < 1.0
