import pytest

from remote_rm.number_verifier import NumberVerifier, is_number, matches
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    [
        ("16", "16", True),
        ("16.0", "16", True),
        ("16.2", "16", False),
        ("$16$", "16", True),
        ("x = 16", "16", True),
        ("32/2", "16", True),
        ("The answer is 16.", "16", True),
        ("16 or 17", "16", False),
        ("16, 17", "16", False),
        ("15 + 1", "16", False),
        ("1,234", "1234", True),
        ("3.14159", "3.14", True),
        ("3.1", "3.14", False),
        ("3.15", "3.14", False),
        ("12", "12 cm", True),
        ("12 m", "12 cm", False),
        ("50%", "1/2", True),
        # Only numbers are read: these take sympy, which is what `math` is for.
        (r"\pi", "3.14", False),
        (r"\sqrt{256}", "16", False),
        ("north", "16", False),
        ("", "16", False),
    ],
)
def test_a_number_is_right_to_the_precision_of_its_label(answer, label, is_right):
    assert matches(answer, label) is is_right


@pytest.mark.parametrize("label", ["north", "1, 3", "B", r"\sqrt{2}", "x", "1/0", "3.14*", "9" * 1001])
def test_a_label_that_is_no_number_is_reported_as_ungradable_and_never_scores(label):
    assert not is_number(label)
    response = f"<think>t</think><answer>{label}</answer>"
    score = NumberVerifier().quick_score(Item(prompt="p", response=response, label=label))
    assert score.parts == {"accuracy": 0.0, "format": 1.0, "ungradable": 1.0}
