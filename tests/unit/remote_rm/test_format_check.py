import pytest

from remote_rm.format_check import format_score

pytestmark = pytest.mark.unit


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
def test_anything_else_is_not(response):
    assert format_score(response) == 0.0
