import pytest

from remote_rm.answers.choice import matches, read_choice
from remote_rm.choice_verifier import ChoiceVerifier
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "answer",
    [
        "B",
        "b",
        "(B)",
        "( b )",
        "[B]",
        "B.",
        "**B**",
        "'B'",
        "Ｂ",
        "（Ｂ）",
        r"$\boxed{\text{B}}$",
        r"\textbf{(B)}\ 12 \text{ cm}",
        "B. 12 cm",
        "B) 12 cm",
        "(B) 12 cm",
        "B: 12 cm",
        "B - 12 cm",
        "B 12 cm",
        "B、12",
        "option B",
        "Option (B)",
        "Choice b",
        "Option B: 12 cm",
        "The answer is B.",
        "The answer is: **B**",
        "The correct answer is option B",
        "The correct option is (B) because it is so.",
        "the answer is B, since 3 > 2",
        "B is the answer",
        "Option B is correct",
        "I choose B",
        "I'd go with option B.",
        "B, not C",
        "(B), not (C)",
        "not A but B",
        "It should be B.",
        "A is wrong, B is correct",
        "B (30°)",
        "B because (A) is too small",
        "A, C and D fail, therefore B.",
        "选B",
        "故选：B。",
        "答案是B",
        "选项B正确",
    ],
)
def test_these_name_b(answer):
    assert read_choice(answer).letter == "B"
    assert matches(answer, "B")
    assert not matches(answer, "C")


@pytest.mark.parametrize(
    "answer",
    [
        "A or B",
        "B or A",
        "either A or B",
        "(A) or (B)",
        "B, C",
        "B; C",
        "B/C",
        "B & C",
        "B and C",
        "both B and C",
        "B C",
        "BC",
        "B.C",
        "(B)(C)",
        "B (or C)",
        "B or maybe C",
        "B\nC",
        "A. 1 B. 2 C. 3",
        "B. 12 or C",
        "B. 12 or C. 13",
        "option A, option B",
        "The answer is A or B",
        "The answer is A or the answer is B",
        "A. B. C. D.",
        "(A) 3 or (B) 4",
        "A is correct and B is correct",
        "选A或B",
        "A和B",
    ],
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
    [
        ("12 cm", "B. 12 cm", True),
        ("A dog", "B. a dog", True),
        ("B. 13 cm", "B. 12 cm", False),
        ("B. the brown dog", "B. a brown dog", True),
        ("B. a cat", "B. a brown dog", False),
        ("13 cm", "B. 12 cm", False),
        ("12 cm", "B", False),
        # The text of an option may itself be letters: then only its own letter counts.
        ("C", "B. C", False),
        ("B. C", "B. C", True),
        ("A or B", "D. A or B", False),
        ("D", "D. A or B", True),
        ("B. plasma (A) and (C)", "B. plasma (A) and (C)", True),
    ],
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
