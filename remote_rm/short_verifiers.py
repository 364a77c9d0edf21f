r"""Judge short answers: the letter of a choice (`B`, `(b)`, `B. 12 cm`, `\boxed{B}`, `option B`), one number, or a text."""

import unicodedata
from dataclasses import dataclass
from typing import ClassVar

from remote_rm.answer_verifier import AnswerVerifier, check_text, setting
from remote_rm.answers import accuracy, choice
from remote_rm.answers.accuracy import is_gradable
from remote_rm.answers.extraction import last_boxed
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.reading import normalize


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


def _canonical(text: str, *, ignore_case: bool) -> str:
    text = unicodedata.normalize("NFKC", text).strip()
    # After case folding, a text may not be in normal form.
    return unicodedata.normalize("NFKC", text.casefold()) if ignore_case else text


@dataclass(frozen=True, kw_only=True)
class ExactVerifier(AnswerVerifier):
    """The same text."""

    name: ClassVar[str] = "exact"

    ignore_case: bool = setting(False, help="take upper and lower case for the same")

    def matches(self, answer: str, label: str) -> bool:
        r"""Return whether the answer is the label, character by character; a label `\boxed{x}` is met by `x` too."""
        texts = (answer, label, last_boxed(label) or "")
        stated, *golds = (_canonical(text, ignore_case=self.ignore_case) for text in texts)
        return stated != "" and stated in golds

    def check_label(self, label: str) -> None:
        """Raise a ValueError for a label of white space only; every other text can be met."""
        check_text(_canonical(label, ignore_case=False))
