import pytest
from helpers.tables import table

from remote_rm.exact_verifier import ExactVerifier, matches
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    table("remote_rm/exact_verifier", "texts_are_equal_after_trimming_and_nfkc"),
)
def test_texts_are_equal_after_trimming_and_nfkc(answer, label, is_right):
    assert matches(answer, label) is is_right


@pytest.mark.parametrize(
    ("answer", "label", "is_right"), [("RYE", "rye", True), ("STRASSE", "straße", True), ("ray", "rye", False)]
)
def test_case_is_an_option(answer, label, is_right):
    assert matches(answer, label, ignore_case=True) is is_right


def test_a_label_that_other_verifiers_would_call_empty_can_be_met_exactly():
    score = ExactVerifier().score(Item(prompt="p", response="<answer>$.</answer>", label="$."))
    assert (score.reward, score.parts) == (1.0, {"accuracy": 1.0, "format": 0.0})
