r"""Judges multiple-choice answers by their letter: `B`, `(b)`, `B. 12 cm`, `\boxed{B}`, `option B`.

python -m remote_rm.choice_verifier --port 5000
"""

from dataclasses import dataclass
from typing import ClassVar

from remote_rm import registry
from remote_rm.answer_verifier import AnswerVerifier
from remote_rm.answers import choice
from remote_rm.reward_function import reward_func_of


@dataclass(frozen=True, kw_only=True)
class ChoiceVerifier(AnswerVerifier):
    """The letter of a multiple-choice answer; a label without a letter from A to J is ungradable."""

    name: ClassVar[str] = "choice"
    reports_ungradable: ClassVar[bool] = True

    def matches(self, answer: str, label: str) -> bool:
        return choice.matches(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label names one letter from A to J."""
        return choice.read_label(label) is not None


VERIFIER = ChoiceVerifier
reward_func = reward_func_of("choice")

if __name__ == "__main__":
    registry.run("choice", None, prog="python -m remote_rm.choice_verifier")
