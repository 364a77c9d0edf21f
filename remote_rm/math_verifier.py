"""Judges mathematical answers by accuracy and format.

python -m remote_rm.math_verifier --host 127.0.0.1 --port 5000 --workers 4
"""

from dataclasses import dataclass
from typing import ClassVar

from remote_rm import registry
from remote_rm.answer_verifier import AnswerVerifier
from remote_rm.answers import accuracy
from remote_rm.answers.accuracy import is_gradable
from remote_rm.reward_function import reward_func_of


@dataclass(frozen=True, kw_only=True)
class MathVerifier(AnswerVerifier):
    """Numbers, expressions, sets, intervals, units, choices and words: the label determines how an answer is read."""

    name: ClassVar[str] = "math"
    reports_ungradable: ClassVar[bool] = True

    def matches(self, answer: str, label: str) -> bool:
        """Return whether they are equal, by sympy if necessary: `VerifierPool` bounds the time."""
        return accuracy.matches(answer, label)

    def quick_match(self, answer: str, label: str) -> bool | None:
        """Return the same if simple rules and values at points can decide, else None."""
        return accuracy.quick_match(answer, label)

    def states(self, answer: str, label: str) -> bool:
        """Return whether they are equal as they are written, as numbers or in one notation."""
        return accuracy.is_stated(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label can be read, as mathematics or as plain words."""
        return is_gradable(label)


reward_func = reward_func_of("math")

if __name__ == "__main__":
    registry.run("math", None, prog="python -m remote_rm.math_verifier")
