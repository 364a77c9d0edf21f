"""Judges answers by how many of the people who were asked gave them: the VQA accuracy (Antol et al. 2015).

python -m remote_rm.vqa_verifier --port 5000
python -m remote_rm.vqa_verifier --accuracy-weight 0.5 --soft-weight 0.5
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import ClassVar

from typing_extensions import Self

from remote_rm import verifier_command
from remote_rm.answer_verifier import Grade, GradedVerifier, Weights, finite_number
from remote_rm.answers.gold import listed_golds
from remote_rm.answers.vqa import ENOUGH_PEOPLE, normalize_answer, similarity, vqa_accuracy
from remote_rm.reward_function import reward_func_of

MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong."""
MAX_LABEL_CHARS = 20_000
"""A longer label is ungradable."""
MAX_QUICK_CELLS = 1_000_000
"""Pairs of a character of the answer and one of the label, up to which they are compared without a worker."""
RIGHT_FROM = 0.5
"""The VQA accuracy from which on an answer counts as right: of ten people, two gave it."""


@dataclass(frozen=True, kw_only=True)
class VqaVerifier(GradedVerifier):
    """The share of people who gave the answer; the label is a JSON list of their answers, or a single one.

    The measure `vqa` is the VQA accuracy; `soft` is the mean of the three highest likenesses to an answer
    (1 - Levenshtein distance / length of the longer text), which counts by `soft_weight`.
    """

    name: ClassVar[str] = "vqa"
    measures: ClassVar[tuple[str, ...]] = ("vqa", "soft")

    soft_weight: float = 0.0

    @property
    def measure_weights(self) -> tuple[float, ...]:
        """How much the VQA accuracy and the soft score count."""
        return (self.weights.accuracy, self.soft_weight)

    def grade(self, answer: str, label: str) -> Grade:
        """Return the VQA accuracy and the soft score."""
        answer = normalize_answer(answer) if len(answer) <= MAX_ANSWER_CHARS else ""
        golds = _golds(label)
        if not answer or not golds:
            return Grade(values=(0.0, 0.0), is_right=False)
        accuracy = vqa_accuracy(answer, golds)
        nearest = sorted((similarity(answer, gold) for gold in golds), reverse=True)[:ENOUGH_PEOPLE]
        return Grade(values=(accuracy, fmean(nearest)), is_right=accuracy >= RIGHT_FROM)

    def is_quick(self, answer: str, label: str) -> bool:
        """Return whether the texts are short."""
        return len(answer) > MAX_ANSWER_CHARS or len(answer) * len(label) <= MAX_QUICK_CELLS

    def is_gradable(self, label: str) -> bool:
        """Return whether somebody gave an answer; a label of more than MAX_LABEL_CHARS characters is not read."""
        return bool(_golds(label))

    def answer_of(self, label: str) -> str:
        """Return the answer that most people gave."""
        golds = Counter(filter(None, _golds(label)))
        return golds.most_common(1)[0][0] if golds else label

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the weights."""
        super().add_arguments(parser)
        parser.add_argument(
            "--soft-weight",
            type=finite_number,
            default=cls.soft_weight,
            help="reward for likeness: the mean of the three highest 1 - normalised edit distance to a person's answer",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Return the verifier that the flags of `add_arguments` describe."""
        weights = Weights(accuracy=args.accuracy_weight, format=args.format_weight)
        return cls(weights=weights, soft_weight=args.soft_weight)


@lru_cache(maxsize=4096)
def _golds(label: str) -> tuple[str, ...]:
    """The normalised answers that are not empty. Cached for the other samples of the group."""
    golds = tuple(map(normalize_answer, listed_golds(label))) if len(label) <= MAX_LABEL_CHARS else ()
    return golds if any(golds) else ()


VERIFIER = VqaVerifier
reward_func = reward_func_of("vqa")

if __name__ == "__main__":
    verifier_command.run("vqa", None, prog="python -m remote_rm.vqa_verifier")
