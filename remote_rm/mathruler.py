"""What EasyR1's reward files import from `mathruler.grader`, where that package is not installed.

Answers are compared as by the verifier `math`.
"""

import sys
from functools import cache

from remote_rm.answers.extraction import last_boxed
from remote_rm.reward_function import RewardFunction, reward_func_of

grader = sys.modules[__name__]


def extract_boxed_content(text: str) -> str:
    r"""Return the content of the last `\boxed{}`, and the text `None` without one, as mathruler does."""
    return last_boxed(text) or "None"


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether an answer is right, as the verifier `math` says; its worker has a limit of processor time."""
    given, truth = str(given_answer).strip(), str(ground_truth).strip()
    if given_answer is None or not truth or given == truth:
        return given_answer is not None and given == truth
    reply = _judge()([given], [""], [truth], responses=[f"<answer>{given}</answer>"])
    return reply["scores"] == [1.0]


@cache
def _judge() -> RewardFunction:
    return reward_func_of("math")
