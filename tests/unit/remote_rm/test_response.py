import pytest

from remote_rm.response import find_response

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "query",
    [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nANSWER<|im_end|><|endoftext|><|endoftext|>",
        "<|endoftext|><|endoftext|><|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi<|im_end|>\n"
        "<|im_start|>assistant\nANSWER<|im_end|>\n",
        "<|user|>\nhi<|end|>\n<|assistant|>\nANSWER<|end|><|endoftext|>",
        "<|user|>hi<|end|><|assistant|>ANSWER<|end|>",
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nANSWER<end_of_turn>\n<pad><pad><eos>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nANSWER<|eot_id|>",
    ],
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
