"""Judges answers that are one number, to the precision of the label; only numbers can be right.

python -m remote_rm.number_verifier --port 5000
"""

from dataclasses import dataclass
from typing import ClassVar

from remote_rm import registry
from remote_rm.answer_verifier import AnswerVerifier
from remote_rm.answers import accuracy
from remote_rm.answers.accuracy import is_gradable
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.reading import normalize
from remote_rm.reward_function import reward_func_of

MAX_LABEL_CHARS = 1000
"""A longer label is ungradable."""


@dataclass(frozen=True, kw_only=True)
class NumberVerifier(AnswerVerifier):
    """One number; a label that is none is ungradable."""

    name: ClassVar[str] = "number"
    reports_ungradable: ClassVar[bool] = True

    def matches(self, answer: str, label: str) -> bool:
        """Return whether the answer states the number of the label; an expression that is not worked out does not."""
        return self.is_gradable(label) and accuracy.is_stated(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is one number, with or without a unit or percent sign."""
        return len(label) <= MAX_LABEL_CHARS and is_gradable(label) and parse_quantity(normalize(label)) is not None


VERIFIER = NumberVerifier
reward_func = reward_func_of("number")

if __name__ == "__main__":
    registry.run("number", None, prog="python -m remote_rm.number_verifier")
