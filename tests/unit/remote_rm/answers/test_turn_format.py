import time

import pytest
from helpers.tables import table

from remote_rm.answers.extraction import turn_format_score, turns_kept

pytestmark = pytest.mark.unit

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
    assert turn_format_score(turns) == 1.0


@pytest.mark.parametrize(
    "turn",
    table("remote_rm/answers/turn_format", "a_turn_before_the_last_that_does_anything_else"),
)
def test_a_turn_before_the_last_that_does_anything_else(turn):
    assert turns_kept([CROP, turn, ANSWER]) == [True, False, True]
    assert turn_format_score([CROP, turn, ANSWER]) == 0.0


@pytest.mark.parametrize(
    "turn",
    table("remote_rm/answers/turn_format", "a_last_turn_that_does_anything_else"),
)
def test_a_last_turn_that_does_anything_else(turn):
    assert turns_kept([CROP, turn]) == [True, False]
    assert turn_format_score([CROP, turn]) == 0.0


def test_no_turns_keep_to_no_format():
    assert turns_kept([]) == []
    assert turn_format_score([]) == 0.0


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
def test_endless_repetition_is_read_in_linear_time(piece):
    started = time.process_time()
    turns_kept(["<think>a</think>" + piece * 20_000 + "x", ANSWER])
    assert time.process_time() - started < 1.0


def test_without_call_tags_every_turn_answers():
    assert turns_kept([ANSWER, CROP, ANSWER], call_tags=()) == [True, False, True]
    assert turns_kept([ANSWER.removeprefix("<think>")], prompt="<think>", call_tags=()) == [True]
