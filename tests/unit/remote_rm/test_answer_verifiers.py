"""What the verifiers of right and wrong answers accept, which labels they cannot read, and what they leave to a worker."""

import pytest
from helpers.tables import table
from helpers.verifiers import scored, scored_response

from remote_rm.answer_verifier import Weights
from remote_rm.answers.choice import matches, read_choice
from remote_rm.format_verifier import FormatVerifier
from remote_rm.list_verifier import items_of
from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

TABLES = [
    ("number", {}, "remote_rm/number_verifier", "a_number_is_right_to_the_precision_of_its_label"),
    ("exact", {}, "remote_rm/exact_verifier", "texts_are_equal_after_trimming_and_nfkc"),
    ("exact", {"ignore_case": True}, "remote_rm/exact_verifier", "case_is_an_option"),
    ("list", {}, "remote_rm/list_verifier", "an_ordered_list_is_compared_element_by_element"),
    (
        "list",
        {"unordered": True},
        "remote_rm/list_verifier",
        "an_unordered_list_gives_each_element_a_partner_of_its_own",
    ),
    ("sokoban", {}, "remote_rm/sokoban_verifier", "moves_are_right_if_they_solve_the_level"),
    ("choice", {}, "remote_rm/choice_verifier", "the_text_of_the_option_counts_when_it_is_the_labels_own"),
]


@pytest.mark.parametrize(
    ("name", "settings", "answer", "label", "is_right"),
    [(name, settings, *row) for name, settings, module, rows in TABLES for row in table(module, rows)],
)
def test_an_answer_is_right_or_wrong(name, settings, answer, label, is_right):
    assert get_verifier(name, **settings).matches(answer, label) is is_right


UNREADABLE = {
    "math": [r"\frac{"],
    "number": ["north", "1, 3", "B", r"\sqrt{2}", "x", "1/0", "3.14*", "9" * 1001],
    "list": ["1,,3", ", 1", r"1, \frac{", "x, " * 400],
    "choice": ["A or B", "12 cm", "north", "K", "B" + " x" * 600],
    "sokoban": ["cat", "#####\n#@-*#\n#####", "#####\n#@$-#\n#####", "[0, 0]"],
    "vqa": ["[]", '["", "?!"]', str(["x" * 3000] * 10).replace("'", '"')],
    "edit_distance": ["[]", '[""]', '[" ", ""]', "x" * 10_001],
    "box": ["cat", "[1, 2, 3]", "[10, 10, 0, 0]", "[0, 0, 9, 9], [nan, 0, 1, 1]", "[0.5]", "[0, 0, 9, 9]" * 101],
}


@pytest.mark.parametrize(("name", "label"), [(name, label) for name in UNREADABLE for label in UNREADABLE[name]])
def test_a_label_that_cannot_be_read_is_reported_as_ungradable_and_never_scores(name, label):
    for answer in (label, "x", "?!", "", "[0, 0, 9, 9]", "[]"):
        parts = scored(name, answer, label).parts
        assert parts == dict.fromkeys(parts, 0.0) | {"format": float(bool(answer)), "ungradable": 1.0}


def test_sokoban_makes_only_the_first_moves_of_an_answer():
    level = "#####\n#@$.#\n#####"
    assert get_verifier("sokoban").matches("Left, " * 49 + "Right", level)
    assert not get_verifier("sokoban").matches("Left, " * 50 + "Right", level)
    assert get_verifier("sokoban", max_moves=51).matches("Left, " * 50 + "Right", level)


# math and format


@pytest.mark.parametrize(
    ("response", "reward", "accuracy", "kept"),
    [
        ("<think>6 * 7</think><answer>42</answer>", 1.5, 1.0, 1.0),
        ("<think>6 * 7</think><answer>41</answer>", 0.5, 0.0, 1.0),
        (r"It is \boxed{42}", 1.0, 1.0, 0.0),
        ("no idea", 0.0, 0.0, 0.0),
        (r"<think>\boxed{42}</think><answer>7</answer>", 0.5, 0.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_the_reward_is_accuracy_plus_half_the_format(response, reward, accuracy, kept):
    score = scored_response("math", response, "42")
    assert (score.reward, score.score) == (reward, accuracy)
    assert score.parts == {"accuracy": accuracy, "format": kept, "ungradable": 0.0}
    assert scored_response("math", response, "42", weights=Weights(accuracy=2.0, format=0.25)).reward == (
        2 * accuracy + 0.25 * kept
    )


def test_only_what_no_value_can_be_computed_of_is_left_to_sympy():
    quick = get_verifier("math").quick_match
    assert quick(r"|-16\sqrt{2}|", r"16\sqrt{2}") is None
    assert scored("math", r"|-16\sqrt{2}|", r"16\sqrt{2}").score == 1.0
    assert quick(r"\sqrt[3]{16}", r"2\sqrt[3]{2}") is True
    assert quick(r"\sqrt[3]{15}", r"2\sqrt[3]{2}") is False
    assert quick(r"\sqrt{8}", r"2\sqrt{2}") is True
    assert quick("(x+1)^2", "x^2+2x+2") is False


@pytest.mark.parametrize(("response", "kept"), [("\n<think>a</think>\n\n<answer>b</answer> ", 1.0), ("", 0.0)])
def test_the_format_alone_is_weighed(response, kept):
    score = FormatVerifier(weight=0.25).score(Item(prompt="p", response=response, label="any"))
    assert (score.reward, score.score, score.parts) == (0.25 * kept, kept, {"format": kept})


def test_a_label_that_other_verifiers_would_call_empty_can_be_met_exactly():
    score = scored_response("exact", "<answer>$.</answer>", "$.")
    assert (score.reward, score.parts) == (1.0, {"accuracy": 1.0, "format": 0.0})


# list


@pytest.mark.parametrize(
    ("text", "items"),
    [
        *((text, ["1", "3", "5"]) for text in table("remote_rm/list_verifier", "the_ways_to_write_a_list")),
        ("dark red, light green", ["dark red", "light green"]),
        ("(1, 2), (3, 4)", ["(1, 2)", "(3, 4)"]),
        ("1,234", ["1", "234"]),
        ("5", ["5"]),
        ("1.5 2.5", ["1.5", "2.5"]),
        ("red green", ["red green"]),
    ],
)
def test_the_elements_of_a_list(text, items):
    assert items_of(text) == items


@pytest.mark.parametrize("unordered", [False, True])
def test_expressions_and_long_lists_are_left_to_a_worker(unordered):
    verifier = get_verifier("list", unordered=unordered)
    assert verifier.quick_match(r"|-16\sqrt{2}|, 1", r"16\sqrt{2}, 1") is None
    assert verifier.quick_match("3, 2", r"16\sqrt{2}, 1") is False
    hundred = ", ".join(str(number) for number in range(100))
    assert verifier.quick_match(hundred, hundred) is None
    assert verifier.matches(hundred, hundred)
    assert verifier.quick_match(f"{hundred}, 100", hundred) is False


# choice


@pytest.mark.parametrize("answer", table("remote_rm/choice_verifier", "these_name_b"))
def test_these_name_b(answer):
    assert read_choice(answer).letter == "B"
    assert matches(answer, "B")
    assert not matches(answer, "C")


@pytest.mark.parametrize("answer", table("remote_rm/choice_verifier", "naming_several_letters_counts_for_none"))
def test_naming_several_letters_counts_for_none(answer):
    assert read_choice(answer) is None
    assert not matches(answer, "A")
    assert not matches(answer, "B")


@pytest.mark.parametrize(
    "answer",
    ["", "A dog", "a cat", "I think so", "K", "12", "Because", "b12", "not B", "Option B is wrong", "It can't be B"]
    + ["B is wrong", "B错误", "不选B", "B" + "x" * 1000],
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
