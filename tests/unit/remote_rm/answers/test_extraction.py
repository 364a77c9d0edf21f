import time

import pytest

from remote_rm.answers.extraction import concluding_text, final_answer, format_score, last_boxed, without_thinking

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>t</think><answer> 42 </answer>", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        (r"<think>\boxed{3}</think><answer>5</answer>", "5"),
        (r"<think>\boxed{3}</think><answer>I don't know</answer>", "I don't know"),
        (r"<answer>5</answer> \boxed{3}", "5"),
        (r"<answer>so $\boxed{\frac{1}{2}}$</answer>", r"\frac{1}{2}"),
        (r"<answer></answer> \boxed{3}", ""),
        (r"<think>\boxed{3}</think> hence \boxed{4}, or rather \boxed{5}.", "5"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("<think>I will write <answer>3</answer></think>The answer is 7.", "7"),
        ("opened in the prompt: 3</think><answer>9</answer>", "9"),
        ("The sum is $3 + 4 = 7$, so we get $x = 7$", "x = 7"),
        ("First 12, then 15 apples.", "15"),
        ("The answer is: **B**.", "B"),
        ("We add.\nx = 5", "5"),
        ("42", "42"),
        ("<think>never closed <answer>42</answer>", "42"),
        ("<think>t</think><answer>42", "42"),
        ("<answer>42</answer><answer>", "42"),
        ("<answer>\n<answer>42</answer></answer>", "42"),
        (r"\boxed{x = \boxed{42}}", "42"),
        ("**Answer:** 42", "42"),
        ("So 6 * 7 is it.\n#### 42", "42"),
        ("The answer is 5!", "5!"),
        ("答案：B。", "B"),
        ("The correct option is (B) 12.", "(B) 12"),
        ("B. 12 cm", "B. 12 cm"),
    ],
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
    [
        "",
        "42",
        "<answer>b</answer>",
        "<think>a</think>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think>so<answer>b</answer>",
        "Well: <think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer> done",
        "<think>a</think><think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>b</answer>",
        "<think>a<answer>b</answer></think>",
        "<think>a</think><answer>b",
        "<Think>a</Think><answer>b</answer>",
    ],
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
    [
        ("<think>[1]</think>\n[\n  {},\n  {}\n]\n", "[\n  {},\n  {}\n]"),
        ("<think>[1]</think>see <answer>\n[2]\n</answer> there", "[2]"),
        ("<answer>[1]</answer><answer>[2]</answer>", "[2]"),
        (r"so \boxed{[1]} or \boxed{[2]}, I think", "[2]"),
        (r"<answer>it is \boxed{[2]}</answer>", "[2]"),
        ("[2]", "[2]"),
        ("", None),
        ("<think>[1]</think>", None),
        ("<think>[1]", None),
        ("<answer> </answer>", None),
    ],
)
def test_all_that_concludes_a_response(response, text):
    assert concluding_text(response) == text
