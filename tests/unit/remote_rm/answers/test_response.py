import time

import pytest
from helpers.tables import table

from remote_rm.answers.extraction import find_response

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "query",
    table("remote_rm/answers/response", "the_response_is_what_stands_in_the_assistant_turn"),
    ids=["chatml", "chatml-padded-left", "phi3", "phi4", "gemma", "llama3"],
)
def test_the_response_is_what_stands_in_the_assistant_turn(query):
    assert find_response(query) == "ANSWER"


def test_the_last_of_several_assistant_turns_is_taken():
    query = "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\nlast<|im_end|>"
    assert find_response(query) == "last"


def test_a_truncated_turn_runs_to_the_end():
    assert find_response("<|im_start|>assistant\n<think>still at") == "<think>still at"


def test_an_empty_turn_is_an_empty_response():
    assert find_response("<|im_start|>assistant\n<|im_end|>") == ""


def test_what_follows_the_end_of_the_turn_is_dropped():
    assert find_response("<|assistant|>one<|end|>two") == "one"


def test_a_plain_query_loses_its_prompt_and_its_padding():
    assert find_response("What is 2+2? 4</s><pad><pad>", prompt="What is 2+2?") == "4"


def test_a_plain_query_with_another_prompt_is_the_response():
    assert find_response("4<|endoftext|>", prompt="Q") == "4"


@pytest.mark.parametrize(
    "query",
    [
        "<|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>ANSWER<|im_end|>",
        "<s>[INST] hi [/INST] ANSWER</s>",
        "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\nANSWER<|eot|>",
    ],
    ids=["phi4-text", "llama2", "llama4"],
)
def test_other_members_of_the_families_are_known_too(query):
    assert find_response(query) == "ANSWER"


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


def test_a_turn_that_the_response_writes_itself_is_part_of_the_response():
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    response = "<think>one <|im_start|>assistant two</think><answer>3</answer>"
    assert find_response(f"{prompt}{response}<|im_end|>", prompt=prompt) == response


def test_the_turn_that_follows_earlier_ones_is_taken():
    earlier = "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n"
    opening = "<|im_start|>assistant\n"
    for prompt in (earlier, earlier + opening):
        assert find_response(f"{earlier}{opening}last<|im_end|>", prompt=prompt) == "last"


def test_of_a_prompt_that_was_cut_from_its_front_the_last_turn_is_taken():
    prompt = "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert find_response("again<|im_end|>\n<|im_start|>assistant\nlast<|im_end|>", prompt=prompt) == "last"


def test_a_prompt_that_is_no_rendered_template_does_no_harm():
    query = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nANSWER<|im_end|>"
    assert find_response(query, prompt='[{"role": "user", "content": "hi"}]') == "ANSWER"


def test_a_megabyte_of_padding_is_cut_in_no_time():
    started = time.process_time()
    assert find_response("4" + "<pad> " * 200_000) == "4"
    assert find_response("<pad>" * 200_000 + "4", prompt="Q <image>") == "<pad>" * 200_000 + "4"
    assert time.process_time() - started < 2
