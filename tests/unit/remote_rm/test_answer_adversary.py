"""Responses put together from labels and words are not right for two labels of which no answer may be both."""

import pytest
from helpers.answers import search
from helpers.tables import table

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit

# What other seeds have found.
FOUND = table("remote_rm/answer_adversary", "found")


@pytest.mark.parametrize(("response", "label", "other"), FOUND)
def test_what_was_found_is_right_for_one_label_at_most(response: str, label: str, other: str):
    for name in ("math", "number", *(["list"] if "," in label else [])):
        verifier = get_verifier(name)
        items = [Item(prompt="", response=response, label=text) for text in (label, other)]
        assert sum(verifier.score(item).parts["accuracy"] for item in items) <= 1, name


def test_ten_thousand_responses_are_right_for_no_two_labels():
    found = search(seed=17, responses=10_000, max_by_sympy=200)
    assert found.breaks == [], found.report()


@pytest.mark.full
@pytest.mark.slow
def test_twenty_thousand_other_responses_are_right_for_no_two_labels():
    found = search(seed=18, responses=20_000, max_by_sympy=150)
    assert found.breaks == [], found.report()
