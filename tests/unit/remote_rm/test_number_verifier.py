import pytest
from helpers.tables import table

from remote_rm.number_verifier import NumberVerifier, is_number, matches
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    table("remote_rm/number_verifier", "a_number_is_right_to_the_precision_of_its_label"),
)
def test_a_number_is_right_to_the_precision_of_its_label(answer, label, is_right):
    assert matches(answer, label) is is_right


@pytest.mark.parametrize("label", ["north", "1, 3", "B", r"\sqrt{2}", "x", "1/0", "3.14*", "9" * 1001])
def test_a_label_that_is_no_number_is_reported_as_ungradable_and_never_scores(label):
    assert not is_number(label)
    response = f"<think>t</think><answer>{label}</answer>"
    score = NumberVerifier().quick_score(Item(prompt="p", response=response, label=label))
    assert score.parts == {"accuracy": 0.0, "format": 1.0, "ungradable": 1.0}
