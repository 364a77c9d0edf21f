"""Judges answers by string equality, after trimming and Unicode normalisation (NFKC).

python -m remote_rm.exact_verifier --ignore-case --port 5000
"""

import unicodedata
from dataclasses import dataclass
from typing import ClassVar

from remote_rm import registry
from remote_rm.answer_verifier import AnswerVerifier, check_text, setting
from remote_rm.answers.extraction import last_boxed
from remote_rm.reward_function import reward_func_of


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


VERIFIER = ExactVerifier
reward_func = reward_func_of("exact")

if __name__ == "__main__":
    registry.run("exact", None, prog="python -m remote_rm.exact_verifier")
