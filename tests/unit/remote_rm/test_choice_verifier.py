import pytest
from helpers.tables import table

from remote_rm.answers.choice import matches, read_choice
from remote_rm.choice_verifier import ChoiceVerifier
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "answer",
    table("remote_rm/choice_verifier", "these_name_b"),
)
def test_these_name_b(answer):
    assert read_choice(answer).letter == "B"
    assert matches(answer, "B")
    assert not matches(answer, "C")


@pytest.mark.parametrize(
    "answer",
    table("remote_rm/choice_verifier", "naming_several_letters_counts_for_none"),
)
def test_naming_several_letters_counts_for_none(answer):
    assert read_choice(answer) is None
    assert not matches(answer, "A")
    assert not matches(answer, "B")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "A dog",
        "a cat",
        "I think so",
        "K",
        "12",
        "Because",
        "b12",
        "not B",
        "Option B is wrong",
        "It can't be B",
        "B is wrong",
        "B错误",
        "不选B",
        "B" + "x" * 1000,
    ],
)
def test_words_and_letters_beyond_j_name_no_choice(answer):
    assert read_choice(answer) is None


@pytest.mark.parametrize(
    "label", ["B", "b", "(B)", "B.", "B. 12 cm", "(B) 12 cm", r"\boxed{B}", r"$\text{B}$", "Option B"]
)
def test_a_label_is_a_letter_with_or_without_its_text(label):
    assert matches("B", label)
    assert matches(label, label)
    assert not matches("A", label)


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    table("remote_rm/choice_verifier", "the_text_of_the_option_counts_when_it_is_the_labels_own"),
)
def test_the_text_of_the_option_counts_when_it_is_the_labels_own(answer, label, is_right):
    assert matches(answer, label) is is_right


@pytest.mark.parametrize("label", ["A or B", "12 cm", "north", "K", "B" + " x" * 600])
def test_a_label_without_one_letter_is_reported_as_ungradable_and_never_scores(label):
    response = f"<think>t</think><answer>{label}</answer>"
    score = ChoiceVerifier().score(Item(prompt="p", response=response, label=label))
    assert score.parts == {"accuracy": 0.0, "format": 1.0, "ungradable": 1.0}


def test_the_thinking_does_not_count_and_the_last_box_does():
    verifier = ChoiceVerifier()
    for response, right in [
        (r"<think>\boxed{B}</think><answer>C</answer>", 0.0),
        (r"<think>A?</think> The answer is \boxed{B}", 1.0),
        ("<think>t</think><answer>A or B</answer>", 0.0),
    ]:
        assert verifier.score(Item(prompt="p", response=response, label="B")).score == right
