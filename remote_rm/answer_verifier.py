"""What verifiers of one final answer share: finding it, weighing it against the format, and the flags of the weights."""

from __future__ import annotations

import argparse
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from remote_rm.answers import accuracy
from remote_rm.answers.accuracy import is_copy
from remote_rm.answers.extraction import final_answer
from remote_rm.responses import format_score
from remote_rm.verifier import Item, Score

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How much each part of a score counts."""

    accuracy: float = 1.0
    format: float = 0.5


DEFAULT_WEIGHTS = Weights()


def setting(default: Any, **flag: object) -> Any:
    """Return a field of a verifier that its command has as a flag too; False makes a switch.

    Args:
        flag: further arguments of `ArgumentParser.add_argument`.
    """
    if default is False:
        flag["action"] = "store_true"
    elif not flag.get("required"):
        flag["default"] = default
    return field(default=default, metadata=flag)


def check_text(label: str) -> None:
    """Raise a ValueError for a label of white space only."""
    if not label.strip():
        raise ValueError(accuracy.EMPTY_LABEL.format(label))


@dataclass(frozen=True, kw_only=True)
class AnswerVerifier(ABC):
    """A verifier that compares the final answer of a response with the label; a subclass says when they are equal.

    The parts of its scores are `accuracy` and `format`, and `ungradable` if `reports_ungradable` is set.
    """

    name: ClassVar[str]
    reports_ungradable: ClassVar[bool] = False
    """Whether some labels cannot be read by this verifier; every answer to such a label is wrong."""

    weights: Weights = DEFAULT_WEIGHTS

    @abstractmethod
    def matches(self, answer: str, label: str) -> bool:
        """Return whether the answer equals the label, whatever it takes."""

    def quick_match(self, answer: str, label: str) -> bool | None:
        """Return the same as `matches` if a bounded number of microseconds suffices, else None."""
        return self.matches(answer, label)

    def states(self, answer: str, label: str) -> bool:
        """Return whether an answer that the prompt has as well is right: nothing in it is worked out."""
        return self.matches(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is of the kind that this verifier reads."""
        return True

    def answer_of(self, label: str) -> str:
        """Return an answer that the label accepts, if there is any."""
        return label

    def check_label(self, label: str) -> None:
        """Raise a ValueError for an empty label."""
        accuracy.check_label(label)

    def quick_score(self, item: Item) -> Score | None:
        """The score if it can be determined quickly; raises ValueError for an empty label."""
        self.check_label(item.label)
        answer = final_answer(item.response)
        is_right = False if answer is None else self.quick_match(answer, item.label)
        if answer is not None and is_right is not False and is_copy(answer, of=item.prompt, label=item.label):
            is_right = self.states(answer, item.label)
        return None if is_right is None else self.weighted(item, is_right=is_right)

    def score(self, item: Item) -> Score:
        """The score; raises ValueError for an empty label."""
        self.check_label(item.label)
        answer = final_answer(item.response)
        if answer is None:
            return self.weighted(item, is_right=False)
        judge = self.states if is_copy(answer, of=item.prompt, label=item.label) else self.matches
        return self.weighted(item, is_right=judge(answer, item.label))

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
        """Add the flags of the weights and of the fields that are a `setting`."""
        parser.add_argument(
            "--accuracy-weight", type=finite_number, default=DEFAULT_WEIGHTS.accuracy, help="reward for being right"
        )
        parser.add_argument(
            "--format-weight", type=finite_number, default=DEFAULT_WEIGHTS.format, help="reward for the format"
        )
        for setting_field in fields(cls):
            if setting_field.metadata:
                parser.add_argument(f"--{setting_field.name.replace('_', '-')}", **setting_field.metadata)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Return the verifier that the flags of `add_arguments` describe; raises ValueError for a value that is refused."""
        given = {own.name: getattr(args, own.name) for own in fields(cls) if own.metadata}
        return cls(weights=Weights(accuracy=args.accuracy_weight, format=args.format_weight), **given)


def finite_number(text: str) -> float:
    """Return the number; raises argparse.ArgumentTypeError for text, infinities and nan."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give one such as 0.5")
    return number


@dataclass(frozen=True, kw_only=True)
class Grade:
    """How right an answer is."""

    values: tuple[float, ...]
    """From 0.0 to 1.0, in the order of the verifier's `measures`."""
    is_right: bool
    """The threshold for metrics that distinguish only right and wrong: accuracy, pass@k, majority@k."""


@dataclass(frozen=True, kw_only=True)
class GradedVerifier(AnswerVerifier):
    """A verifier whose score and reward follow a measure; a subclass says how right an answer is.

    The parts of its scores are `accuracy` (right or wrong), each measure under its name, `format` and `ungradable`; the
    score is the first measure, and the reward the weighted sum of the measures and the format.
    """

    reports_ungradable: ClassVar[bool] = True
    measures: ClassVar[tuple[str, ...]]
    """The names of its values, the score first."""

    @abstractmethod
    def grade(self, answer: str, label: str) -> Grade:
        """Return how right the answer is; 0 if the label cannot be read."""

    def grade_of(self, item: Item, answer: str) -> Grade:
        """Return how right an item's answer is."""
        return self.grade(answer, item.label)

    def can_grade(self, item: Item) -> bool:
        """Return whether some answer to an item could be right."""
        return self.is_gradable(item.label)

    def is_quick(self, answer: str, label: str) -> bool:
        """Return whether a bounded number of microseconds is enough for `grade`."""
        return True

    def answer_in(self, response: str) -> str | None:
        """Return the part of a response that is judged; None if it states no answer."""
        return final_answer(response)

    @property
    def measure_weights(self) -> tuple[float, ...]:
        """How much each measure counts."""
        return (self.weights.accuracy,)

    def check_label(self, label: str) -> None:
        """Raise a ValueError for a label of white space only."""
        check_text(label)

    def matches(self, answer: str, label: str) -> bool:
        """Return whether the answer is right."""
        return self.grade(answer, label).is_right

    def quick_match(self, answer: str, label: str) -> bool | None:
        """Return the same as `matches` if that is quick, else None."""
        return self.matches(answer, label) if self.is_quick(answer, label) else None

    def quick_score(self, item: Item) -> Score | None:
        """The score if it can be determined quickly; raises ValueError for an empty label."""
        self.check_label(item.label)
        answer = self.answer_in(item.response)
        return self._scored(item, answer) if answer is None or self.is_quick(answer, item.label) else None

    def score(self, item: Item) -> Score:
        """The score; raises ValueError for an empty label."""
        self.check_label(item.label)
        return self._scored(item, self.answer_in(item.response))

    def weighted(self, item: Item, *, is_right: bool) -> Score:
        """Return the score of an item that is all right, or all wrong."""
        return self._graded(item, Grade(values=(float(is_right),) * len(self.measures), is_right=is_right))

    def _scored(self, item: Item, answer: str | None) -> Score:
        if answer is None:
            return self.weighted(item, is_right=False)
        return self._graded(item, self.grade_of(item, answer))

    def _graded(self, item: Item, grade: Grade) -> Score:
        kept = format_score(item.response, prompt=item.prompt)
        measured = sum(weight * value for weight, value in zip(self.measure_weights, grade.values, strict=True))
        parts = {"accuracy": float(grade.is_right), **dict(zip(self.measures, grade.values, strict=True))}
        parts |= {"format": kept, "ungradable": float(not self.can_grade(item))}
        return Score(reward=measured + self.weights.format * kept, score=grade.values[0], parts=parts)


def is_matchable(table: Sequence[Sequence[bool]]) -> bool:
    """Return whether each row can be given a column of its own in which it is true.

    The first fitting column may be the wrong one if what fits is not transitive.
    """
    row_of: dict[int, int] = {}

    def find_column(row: int, seen: set[int]) -> bool:
        for column, fits in enumerate(table[row]):
            if fits and column not in seen:
                seen.add(column)
                if column not in row_of or find_column(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    return all(find_column(row, set()) for row in range(len(table)))
