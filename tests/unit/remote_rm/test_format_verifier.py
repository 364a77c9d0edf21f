import pytest

from remote_rm.format_verifier import FormatVerifier
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("response", "kept"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a</think>\n\n<answer>b</answer> ", 1.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> so", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_alone_is_weighed(response, kept):
    score = FormatVerifier(weight=0.25).score(Item(prompt="p", response=response, label="any"))
    assert (score.reward, score.score, score.parts) == (0.25 * kept, kept, {"format": kept})
