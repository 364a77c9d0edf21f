import time

import pytest
from helpers.tables import table

from remote_rm.answers.extraction import concluding_text, final_answer, format_score, last_boxed, without_thinking

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think><answer>b</answer>",
        "  <think>a\nb</think>\n\n <answer>\nb\n</answer>\n",
        "<think>\0</think><answer>\0\ud800</answer>",
    ],
)
def test_one_think_block_then_one_answer_block_is_the_format(response):
    assert format_score(response) == 1.0


@pytest.mark.parametrize(
    "response",
    table("remote_rm/answers/extraction", "anything_else_is_not_the_format"),
)
def test_anything_else_is_not_the_format(response):
    assert format_score(response) == 0.0


def test_a_think_block_may_be_opened_by_the_prompt():
    prompt = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert format_score("two twos</think><answer>4</answer>", prompt=prompt) == 1.0
    assert format_score("two twos</think><answer>4</answer>") == 0.0
    # Opened once more by the response, there are two.
    assert format_score("<think>two twos</think><answer>4</answer>", prompt=prompt) == 0.0
    assert format_score("<answer>4</answer>", prompt=prompt) == 0.0


@pytest.mark.parametrize(
    ("response", "text"),
    table("remote_rm/answers/extraction", "all_that_concludes_a_response"),
)
def test_all_that_concludes_a_response(response, text):
    assert concluding_text(response) == text
