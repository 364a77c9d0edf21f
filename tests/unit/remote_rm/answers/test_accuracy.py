"""How the answer of a response is found, and compared with the label."""

import time

import pytest
from helpers.tables import table

from remote_rm.answers.accuracy import check_label, matches, quick_match
from remote_rm.answers.extraction import concluding_text, final_answer, last_boxed, without_thinking

EQUAL = table("remote_rm/answers/accuracy", "equal")

DIFFERENT = table("remote_rm/answers/accuracy", "different")


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal_answers_match(answer, label):
    assert matches(answer, label)
    assert quick_match(answer, label) in (True, None)


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_answers_do_not(answer, label):
    assert not matches(answer, label)
    assert quick_match(answer, label) in (False, None)


@pytest.mark.parametrize(
    ("answer", "label"), table("remote_rm/answers/accuracy", "common_answers_are_decided_without_sympy")
)
def test_common_answers_are_decided_without_sympy(answer, label):
    assert quick_match(answer, label) is not None


@pytest.mark.parametrize("label", ["", "  ", "$$", "$ $", "."])
def test_an_empty_label_is_refused(label):
    with pytest.raises(ValueError, match="gold answer is empty"):
        check_label(label)
    with pytest.raises(ValueError, match="gold answer is empty"):
        matches("42", label)


def test_an_overlong_answer_is_compared_as_a_string():
    assert quick_match("1" * 2000, "1" * 2000) is True
    assert quick_match("(" * 2000 + "1" + ")" * 2000, "1") is False


@pytest.mark.parametrize(
    "piece", ["(", "{", r"\text{", "1,", "1 ", "-", "=", "a ", "9^", "\\", "$", "1.", "*", "and ", "answer is ", r"\{"]
)
def test_degenerate_answers_are_refused_quickly(piece):
    answer = (piece * 1000)[:1000]
    started = time.process_time()
    assert not quick_match(answer, "1, 3, 5")
    assert not quick_match(answer, "12.5 cm")
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("response", "answer"),
    table("remote_rm/answers/extraction", "the_answer_block_wins_then_the_last_box_then_the_last_value"),
)
def test_the_answer_block_wins_then_the_last_box_then_the_last_value(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    ["", "<think>42", r"<think>\boxed{42}</think>", r"<think>never closed \boxed{42}", "I do not know that one"],
)
def test_thinking_alone_and_words_alone_are_no_answer(response):
    assert final_answer(response) is None


def test_several_think_blocks_are_all_cut():
    assert without_thinking("a<think>b</think>c<think>d</think>e").split() == ["a", "c", "e"]


def test_nested_braces_of_a_box_are_balanced():
    assert last_boxed(r"\boxed{\frac{a_{1}}{\sqrt{2}}}") == r"\frac{a_{1}}{\sqrt{2}}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "<think>", "</think><think>", "answer is ", "$", r"\(", "1,234", "<answer>", "answer:::"]
)
def test_endless_repetition_is_read_in_linear_time(piece):
    started = time.process_time()
    final_answer(piece * 20_000)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(("response", "text"), table("remote_rm/answers/extraction", "all_that_concludes_a_response"))
def test_all_that_concludes_a_response(response, text):
    assert concluding_text(response) == text
