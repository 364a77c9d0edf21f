"""The task `digits`: add up or sort a few digits, stated in words and symbols (text) or handwritten (image)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lmm_r1.tasks.base import Modality, Split, TaskRow
from lmm_r1.tasks.handwriting import Page
from lmm_r1.tasks.held_out import split_of

Question = Literal["sum", "sort"]
QUESTIONS: tuple[Question, ...] = ("sum", "sort")
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """Rows over 2 or 3 digits. Train and test share neither (question, digits in order) nor, in images, a scan.

    An order counts as a combination of its own: `3 + 7` may be in train and `7 + 3` in test. Sums of up to three
    digits have only 275 unordered combinations, too few to hold some out and still train on each total.
    """

    min_digits: int = 2
    max_digits: int = 3
    slips: float = 0.0
    """How many of the solutions end with a slip: the last number that is worked out is off by one. 0 to 1."""
    spelled_share: float = 0.5
    """How many of a text row's digits are words; the others are symbols."""
    page: Page = field(default_factory=Page)

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.max_digits <= self.page.cells**2:
            raise ValueError(
                f"{self.min_digits} to {self.max_digits} digits: at least one is needed, and no more than the page's "
                f"{self.page.cells**2} cells"
            )

        if not 0 <= self.slips <= 1:
            raise ValueError(f"slips {self.slips} is a share: it must be from 0 to 1")

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from a random stream of its own; `mixed` alternates text and image rows."""
        for index in range(rows):
            kind = ("text", "image")[index % 2] if modality == "mixed" else modality
            rng = random.Random(f"digits {split} {kind} {seed} {index}")
            question, digits = self._draw(split=split, rng=rng)
            write = self._as_text if kind == "text" else self._as_image
            yield TaskRow(
                messages=[{"role": "user", "content": write(question, digits, split=split, rng=rng)}],
                answer=answer_of(question, digits),
                datasource=f"digits_{kind}_{question}",
                solution=self._solution(question, digits, rng=rng),
            )

    def _solution(self, question: Question, digits: tuple[int, ...], *, rng: random.Random) -> str:
        # A single digit is only read: a slip there would teach to misread.
        if len(digits) == 1 or rng.random() >= self.slips:
            return solution_of(question, digits)
        return solution_of(question, digits, slip=rng.choice((-1, 1)))

    def _draw(self, *, split: Split, rng: random.Random) -> tuple[Question, tuple[int, ...]]:
        """A question and digits in order that belong to `split`."""
        while True:
            question = rng.choice(QUESTIONS)
            count = rng.randint(self.min_digits, self.max_digits)
            digits = tuple(rng.randrange(10) for _ in range(count))
            if split_of(combination(question, digits)) == split:
                return question, digits

    def _as_text(self, question: Question, digits: tuple[int, ...], *, split: Split, rng: random.Random) -> str:
        names = [DIGIT_WORDS[digit] if rng.random() < self.spelled_share else str(digit) for digit in digits]
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
        return _TEXT_PROMPTS[question].format(listed)

    def _as_image(
        self, question: Question, digits: tuple[int, ...], *, split: Split, rng: random.Random
    ) -> list[dict[str, Any]]:
        page = self.page.draw(self.page.place(digits, split=split, rng=rng))
        return [{"type": "image", "image": page}, {"type": "text", "text": _IMAGE_PROMPTS[question]}]


_TEXT_PROMPTS = {"sum": "What is the sum of {}?", "sort": "Sort {}."}
_IMAGE_PROMPTS = {"sum": "What is the sum of the digits?", "sort": "Sort the digits."}


def combination(question: Question, digits: tuple[int, ...]) -> str:
    """The name under which a combination is on one side of the train/test line: `"sum 3 7 2"`."""
    return f"{question} {_spaced(digits)}"


def answer_of(question: Question, digits: tuple[int, ...]) -> str:
    """`sum` of (3, 7, 2) → `"12"`; `sort` → `"2, 3, 7"` (ascending)."""
    return str(sum(digits)) if question == "sum" else ", ".join(map(str, sorted(digits)))


def solution_of(question: Question, digits: tuple[int, ...], *, slip: int = 0) -> str:
    """`<think>3 7 2. 3+7=10. 10+2=12.</think><answer>12</answer>`: the digits as read, then one step after another.

    `slip` (1 or -1) is added to the last number that is worked out, and to the answer.
    """
    steps = [_spaced(digits)]
    if question == "sum":
        total = digits[0]
        for digit in digits[1:-1]:
            steps.append(f"{total}+{digit}={total + digit}")
            total += digit
        answer = str(sum(digits) + slip)
        if len(digits) > 1:
            steps.append(f"{total}+{digits[-1]}={answer}")
    else:
        *smaller, largest = sorted(digits)
        listed = [*smaller, abs(largest + slip)]
        steps.append(_spaced(listed))
        answer = ", ".join(map(str, listed))
    return f"<think>{'. '.join(steps)}.</think><answer>{answer}</answer>"


def _spaced(digits: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(str, digits))


TASK = DigitsTask()
