"""What verifiers of one final answer share: finding it, weighing it against the format, and the flags of the weights."""

import argparse
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from remote_rm.answers import accuracy
from remote_rm.answers.extraction import final_answer, format_score
from remote_rm.verifier import Item, Score


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How much each part of a score counts."""

    accuracy: float = 1.0
    format: float = 0.5


DEFAULT_WEIGHTS = Weights()


@dataclass(frozen=True, kw_only=True)
class AnswerVerifier(ABC):
    """A verifier that compares the final answer of a response with the label; a subclass says when they are equal.

    The parts of its scores are `accuracy` and `format`, and `ungradable` where `reports_ungradable` is set.
    """

    name: ClassVar[str]
    reports_ungradable: ClassVar[bool] = False
    """Whether some labels cannot be read by this verifier; every answer to such a label is wrong."""

    weights: Weights = DEFAULT_WEIGHTS

    @abstractmethod
    def matches(self, answer: str, label: str) -> bool:
        """Return whether the answer equals the label, whatever it takes."""

    def quick_match(self, answer: str, label: str) -> bool | None:
        """Return the same as `matches` where a bounded number of microseconds is enough to tell, else None."""
        return self.matches(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is of the kind that this verifier reads."""
        return True

    def answer_of(self, label: str) -> str:
        """Return the answer that a label wants: one that is right where any is."""
        return label

    def check_label(self, label: str) -> None:
        """Raise a ValueError for an empty label."""
        accuracy.check_label(label)

    def quick_score(self, item: Item) -> Score | None:
        """The score where it can be told quickly; raises ValueError for an empty label."""
        self.check_label(item.label)
        answer = final_answer(item.response)
        is_right = False if answer is None else self.quick_match(answer, item.label)
        return None if is_right is None else self.weighted(item, is_right=is_right)

    def score(self, item: Item) -> Score:
        """The score; raises ValueError for an empty label."""
        self.check_label(item.label)
        answer = final_answer(item.response)
        return self.weighted(item, is_right=answer is not None and self.matches(answer, item.label))

    def failed_score(self, item: Item) -> Score:
        """A wrong answer; the format counts as it is."""
        return self.weighted(item, is_right=False)

    def weighted(self, item: Item, *, is_right: bool) -> Score:
        """Return the parts of a judged item and their weighted sum."""
        parts = {"accuracy": float(is_right), "format": format_score(item.response, prompt=item.prompt)}
        reward = self.weights.accuracy * parts["accuracy"] + self.weights.format * parts["format"]
        if self.reports_ungradable:
            parts["ungradable"] = float(not self.is_gradable(item.label))
        return Score(reward=reward, score=parts["accuracy"], parts=parts)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the weights."""
        parser.add_argument(
            "--accuracy-weight", type=finite_number, default=DEFAULT_WEIGHTS.accuracy, help="reward for being right"
        )
        parser.add_argument(
            "--format-weight", type=finite_number, default=DEFAULT_WEIGHTS.format, help="reward for the format"
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Return the verifier that the flags of `add_arguments` describe."""
        return cls(weights=Weights(accuracy=args.accuracy_weight, format=args.format_weight))


def finite_number(text: str) -> float:
    """Return the number; raises argparse.ArgumentTypeError for text, infinities and nan."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give one such as 0.5")
    return number
