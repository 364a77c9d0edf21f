"""How the answer of a response is found."""

import time

import pytest
from helpers.tables import table

from remote_rm.answers.extraction import concluding_text, final_answer, last_boxed, without_thinking


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
