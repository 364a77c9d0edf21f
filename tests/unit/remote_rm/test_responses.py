"""How a response is found in a query, and whether it keeps to the format."""

import time

import pytest
from helpers.tables import table

from remote_rm.responses import find_response, format_score, turns_kept


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


@pytest.mark.parametrize("response", table("remote_rm/answers/extraction", "anything_else_is_not_the_format"))
def test_anything_else_is_not_the_format(response):
    assert format_score(response) == 0.0


def test_a_think_block_may_be_opened_by_the_prompt():
    prompt = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert format_score("two twos</think><answer>4</answer>", prompt=prompt) == 1.0
    assert format_score("two twos</think><answer>4</answer>") == 0.0
    # Opened once more by the response, there are two.
    assert format_score("<think>two twos</think><answer>4</answer>", prompt=prompt) == 0.0
    assert format_score("<answer>4</answer>", prompt=prompt) == 0.0


@pytest.mark.parametrize(("query", "prompt", "response"), table("remote_rm/answers/response", "responses"))
def test_the_response_is_found_in_the_query(query, prompt, response):
    assert find_response(query, prompt=prompt) == response


@pytest.mark.parametrize("patches", [1, 4, 1000])
def test_the_number_of_image_tokens_does_not_matter(patches):
    prompt = "<|im_start|>user\n<|image_pad|>hi<|im_end|>\n<|im_start|>assistant\n"
    query = prompt.replace("<|image_pad|>", "<|image_pad|>" * patches) + "ANSWER<|im_end|>"
    assert find_response(f"<|endoftext|>{query}", prompt=prompt) == "ANSWER"


@pytest.mark.parametrize("patches", [1, 4, 1000])
@pytest.mark.parametrize("prompt", ["<image>\nWhat is 2+2? ", "What <image> is <image> it?", "Look: <image>"])
def test_the_number_of_image_tokens_does_not_matter_in_plain_text(prompt, patches):
    query = "<pad><pad>" + prompt.replace("<image>", "<image>" * patches) + "It is 4</s>"
    assert find_response(query, prompt=prompt) == "It is 4"


def test_a_megabyte_of_padding_is_cut_in_no_time():
    started = time.process_time()
    assert find_response("4" + "<pad> " * 200_000) == "4"
    assert find_response("<pad>" * 200_000 + "4", prompt="Q <image>") == "<pad>" * 200_000 + "4"
    assert time.process_time() - started < 2


CROP = '<think>There.</think>\n<grounding>{"bbox_2d": [0, 0, 1, 1], "source": "original_image"}</grounding>'
QWEN = '<think>There.</think>\n\n<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>'
TWO = "<think>There.</think><tool_call>1</tool_call>\n<tool_call>2</tool_call>\n"
ANSWER = "<think>So.</think>\n<answer>B</answer>"


@pytest.mark.parametrize(
    "turns",
    [[ANSWER], [CROP, ANSWER], [CROP, CROP, QWEN, TWO, ANSWER], ["<think>a</think><tool>name: zoom</tool>", ANSWER]],
)
def test_every_turn_thinks_and_calls_and_the_last_thinks_and_answers(turns):
    assert turns_kept(turns) == [True] * len(turns)


@pytest.mark.parametrize(
    "turn", table("remote_rm/answers/turn_format", "a_turn_before_the_last_that_does_anything_else")
)
def test_a_turn_before_the_last_that_does_anything_else(turn):
    assert turns_kept([CROP, turn, ANSWER]) == [True, False, True]


@pytest.mark.parametrize("turn", table("remote_rm/answers/turn_format", "a_last_turn_that_does_anything_else"))
def test_a_last_turn_that_does_anything_else(turn):
    assert turns_kept([CROP, turn]) == [True, False]


def test_each_turn_may_be_opened_by_the_template():
    prompt = "<|im_start|>assistant\n<think>\n"
    turns = [turn.removeprefix("<think>") for turn in (CROP, ANSWER)]
    assert turns_kept(turns, prompt=prompt) == [True, True]
    assert turns_kept(turns) == [False, False]


def test_the_tags_of_the_calls_are_told():
    turns = ["<think>a</think><look>left</look>", ANSWER]
    assert turns_kept(turns) == [False, True]
    assert turns_kept(turns, call_tags=["look"]) == [True, True]
    assert turns_kept([CROP, ANSWER], call_tags=["look"]) == [False, True]


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>1</tool_call>", "</think>", " ", "<think>"])
def test_endless_calls_are_read_in_linear_time(piece):
    started = time.process_time()
    turns_kept(["<think>a</think>" + piece * 20_000 + "x", ANSWER])
    assert time.process_time() - started < 1.0


def test_without_call_tags_every_turn_answers():
    assert turns_kept([ANSWER, CROP, ANSWER], call_tags=()) == [True, False, True]
    assert turns_kept([ANSWER.removeprefix("<think>")], prompt="<think>", call_tags=()) == [True]
