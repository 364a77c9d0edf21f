import pytest

from lmm_r1.evaluation.scoreboard.page import text_parts

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("<think>1 + 1</think><answer>2</answer>", ["think", "answer"]),
        ("so <think>a</think> and\n<answer>2</answer>.", ["other", "think", "other", "answer", "other"]),
        # The chat template has opened the thought.
        ("1 + 1</think><answer>2</answer>", ["think", "answer"]),
        # Cut off.
        ("<think>1 + 1", ["think"]),
        ("<think>a</think><answer>2", ["think", "answer"]),
        ("2", ["other"]),
        ("a</answer>", ["other"]),
        ("", []),
        ("<answer><think>x</think></answer>", ["answer"]),
    ],
)
def test_thought_and_answer_are_parts_of_their_own_and_nothing_is_lost(text, kinds):
    parts = text_parts(text)
    assert [part.kind for part in parts] == kinds
    assert "".join(part.opening + part.text + part.closing for part in parts) == text
