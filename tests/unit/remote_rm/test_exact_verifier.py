import pytest

from remote_rm.exact_verifier import ExactVerifier, matches
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    [
        ("Rye", "Rye", True),
        ("  Rye\n", "Rye", True),
        ("rye", "Rye", False),
        ("Rye.", "Rye", False),
        ("4", "4.0", False),
        ("ﬁn", "fin", True),
        ("４２", "42", True),
        ("e\u0301", "\u00e9", True),
        ("a  b", "a b", False),
        ("$", "$", True),
        ("42", r"\boxed{42}", True),
        ("", "x", False),
    ],
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
