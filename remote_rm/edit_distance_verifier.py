"""Judges answers by how many characters they are away from the label: ANLS (Biten et al. 2019, arXiv 1905.13648).

python -m remote_rm.edit_distance_verifier --port 5000
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from remote_rm import verifier_command
from remote_rm.answer_verifier import Grade, GradedVerifier, Weights, finite_number
from remote_rm.answers.gold import listed_golds
from remote_rm.answers.vqa import similarity
from remote_rm.reward_function import reward_func_of

MAX_CHARS = 10_000
"""A longer answer is wrong, and a longer label is ungradable."""
MAX_QUICK_CELLS = 1_000_000
"""Pairs of a character of the answer and one of the label, up to which they are compared without a worker."""


@dataclass(frozen=True, kw_only=True)
class EditDistanceVerifier(GradedVerifier):
    """1 - Levenshtein distance / length of the longer text, of the nearest of the golds; case and white space are folded.

    The measure `anls` is 0 from the threshold on: such an answer is another one, not a misspelt one. Right is an
    answer that is one of the golds.
    """

    name: ClassVar[str] = "edit_distance"
    measures: ClassVar[tuple[str, ...]] = ("anls",)

    anls_threshold: float = 0.5
    """From this share of changed characters on, the score is 0; with 1 every similarity counts."""

    def __post_init__(self) -> None:
        """Raise a ValueError unless the threshold is a share."""
        if not 0 < self.anls_threshold <= 1:
            raise ValueError(f"--anls-threshold must be above 0 and at most 1, got {self.anls_threshold:g}")

    def grade(self, answer: str, label: str) -> Grade:
        """Return the likeness to the nearest gold."""
        answer = _folded(answer)
        if not answer or len(answer) > MAX_CHARS:
            return Grade(values=(0.0,), is_right=False)
        best = max((self._likeness(answer, gold=gold) for gold in _golds(label)), default=0.0)
        return Grade(values=(best,), is_right=best == 1.0)

    def is_quick(self, answer: str, label: str) -> bool:
        """Return whether the texts are short."""
        return len(answer) * len(label) <= MAX_QUICK_CELLS

    def is_gradable(self, label: str) -> bool:
        """Return whether the label has a text; one of more than MAX_CHARS characters is not read."""
        return bool(_golds(label))

    def answer_of(self, label: str) -> str:
        """Return the first gold."""
        return next(iter(_golds(label)), label)

    def _likeness(self, answer: str, *, gold: str) -> float:
        shorter, longer = sorted((len(answer), len(gold)))
        # Missing characters must be inserted in any case.
        if (longer - shorter) / longer >= self.anls_threshold:
            return 0.0
        likeness = similarity(answer, gold)
        return likeness if 1.0 - likeness < self.anls_threshold else 0.0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the weights and of the threshold."""
        super().add_arguments(parser)
        parser.add_argument(
            "--anls-threshold",
            type=finite_number,
            default=cls.anls_threshold,
            help="share of characters to change from which on an answer is worth nothing; 1: none",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Return the verifier that the flags of `add_arguments` describe; raises ValueError for a threshold that is none."""
        weights = Weights(accuracy=args.accuracy_weight, format=args.format_weight)
        return cls(weights=weights, anls_threshold=args.anls_threshold)


def _golds(label: str) -> list[str]:
    if len(label) > MAX_CHARS:
        return []
    return [gold for gold in map(_folded, listed_golds(label)) if gold]


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


VERIFIER = EditDistanceVerifier
reward_func = reward_func_of("edit_distance")

if __name__ == "__main__":
    verifier_command.run("edit_distance", None, prog="python -m remote_rm.edit_distance_verifier")
