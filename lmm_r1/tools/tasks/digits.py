"""The task `digits`: add up or sort a few digits, stated in words and symbols (text) or handwritten (image)."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from lmm_r1.tools.tasks import Modality, Parts, Split, TaskRow, check_image_share, kind_of_row, split_of

# Chalk on a grey board: the board is close to the mean that image processors subtract, so that an empty cell gives
# features near zero and does not drown the digits. The gain over black on white was not measured on its own.
BOARD = 122
CHALK = 255
SCAN_PX = 8
_MOST_INK = 16.0
COLUMNS = 3
"""Of cells on an image, each with one digit: their order is from left to right."""
CELL_PX = 28
"""Pixels on a cell's side: one visual token of a ViT with patches of 14 pixels merged 2x2."""
MIN_DIGIT_PX, MAX_DIGIT_PX = 22, 26
JITTER_PX = 2
"""The largest distance of a digit from its cell's centre; it is smaller for digits that would leave the cell."""
_SCANS = Path(__file__).with_name("digits.csv.gz")
Question = Literal["sum", "sort"]
QUESTIONS: tuple[Question, ...] = ("sum", "sort")
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@functools.lru_cache(maxsize=1)
def _bundled() -> tuple[tuple[int, Image.Image], ...]:
    """(digit, scan) for every scan in the file's order; scans are grey, chalk on a board.

    The test set of Alpaydin and Kaynak's *Optical Recognition of Handwritten Digits* (UCI Machine Learning Repository,
    CC BY 4.0), as scikit-learn has it. With that library installed, transformers imports it in every process.
    """
    table = np.loadtxt(_SCANS, delimiter=",")  # (1797, 65): 64 pixels of 0 to 16, then the digit
    ink = table[:, :-1].reshape(-1, SCAN_PX, SCAN_PX)
    pixels = (BOARD + (CHALK - BOARD) * ink / _MOST_INK).round().astype(np.uint8)
    return tuple((int(digit), Image.fromarray(scan)) for digit, scan in zip(table[:, -1], pixels, strict=True))


@functools.lru_cache(maxsize=2)
def scan_indices(split: Split) -> tuple[tuple[int, ...], ...]:
    """For each digit 0 to 9 the indices of its scans in `split`; no scan is in both splits."""
    indices: list[list[int]] = [[] for _ in range(10)]
    for index, (digit, _) in enumerate(_bundled()):
        if split_of(f"scan {index}") == split:
            indices[digit].append(index)
    return tuple(map(tuple, indices))


def scan(index: int) -> Image.Image:
    """The scan at `index` of the file: 8x8 pixels, grey, chalk on a board."""
    return _bundled()[index][1]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one scan on a page, in pixels from the upper left corner."""

    scan_index: int
    left: int
    top: int
    size: int


def placed(digits: tuple[int, ...], *, rows: int, split: Split, rng: random.Random) -> list[Placement]:
    """Random scans of digits from left to right, each in a column and in a random row of cells of its own."""
    placements = []
    for column, digit in enumerate(digits):
        row, size = rng.randrange(rows), rng.randint(MIN_DIGIT_PX, MAX_DIGIT_PX)
        margin = (CELL_PX - size) // 2
        reach = min(JITTER_PX, margin)
        placement = Placement(
            scan_index=rng.choice(scan_indices(split)[digit]),
            left=column * CELL_PX + margin + rng.randint(-reach, reach),
            top=row * CELL_PX + margin + rng.randint(-reach, reach),
            size=size,
        )
        placements.append(placement)
    return placements


def drawn(placements: list[Placement], *, size_px: tuple[int, int]) -> Image.Image:
    """The board in grey with each scan enlarged to its size."""
    board = Image.new("L", size_px, BOARD)
    for placement in placements:
        enlarged = scan(placement.scan_index).resize((placement.size, placement.size), Image.Resampling.BICUBIC)
        board.paste(enlarged, (placement.left, placement.top))
    return board


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """Rows over three digits. Train and test share neither (question, digits in order) nor, in images, a scan.

    Each order counts as its own combination: `3 + 7 + 2` may be in train and `7 + 3 + 2` in test. Three digits have
    1,000 ordered combinations per question, but only 220 unordered ones: too few to hold some out and still train on
    each total.
    """

    min_digits: int = 3
    max_digits: int = 3
    max_image_digits: int | None = None
    """Most digits in an image; None is `max_digits`. Where it is less than `min_digits`, each image has this many.

    A cold start that first sees images of one digit learns to read sooner.
    """
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have an image, 0 to 1, evenly spread over the rows."""
    spelled_share: float = 0.5
    """How many of a text row's digits are words; the others are symbols."""
    page_rows: int = COLUMNS
    """Rows of cells of an image; with one row its digits form a line."""
    board_width: int | None = None
    """Pixels of an image's width, whose left the cells take; None is theirs. With the size that a model's image
    processor scales to, the cells stay as large as they are drawn."""
    board_height: int | None = None
    """Pixels of an image's height, whose top the cells take; None is theirs."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.max_digits <= COLUMNS:
            raise ValueError(
                f"{self.min_digits} to {self.max_digits} digits: at least one is needed, the most must not be below "
                f"the fewest, and an image has {COLUMNS} columns of one digit each"
            )
        if self.max_image_digits is not None and not 1 <= self.max_image_digits <= self.max_digits:
            raise ValueError(
                f"at most {self.max_image_digits} digits in an image: it must be at least one and no more than the "
                f"{self.max_digits} that a row may have"
            )
        if not 1 <= self.page_rows <= COLUMNS:
            raise ValueError(f"a page of {self.page_rows} rows of cells: 1 to {COLUMNS} are known")
        (board_width, board_height), (width, height) = self.board_px, self._page_px
        if board_width < width or board_height < height:
            raise ValueError(
                f"a board of {board_width} x {board_height} px is smaller than the page of {width} x {height} px"
            )
        check_image_share(self.image_share)

    @property
    def _page_px(self) -> tuple[int, int]:
        return COLUMNS * CELL_PX, self.page_rows * CELL_PX

    @property
    def board_px(self) -> tuple[int, int]:
        """Width and height of an image."""
        width, height = self._page_px
        return (
            width if self.board_width is None else self.board_width,
            height if self.board_height is None else self.board_height,
        )

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream; `mixed` spreads image rows by `image_share`."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            rng = random.Random(f"digits {split} {kind} {seed} {index}")
            most = self.max_digits if kind == "text" else self.max_image_digits or self.max_digits
            question, digits = self._draw(min(self.min_digits, most), most, split=split, rng=rng)
            write = self._as_text if kind == "text" else self._as_image
            yield TaskRow(
                messages=[{"role": "user", "content": write(question, digits, split=split, rng=rng)}],
                answer=answer_of(question, digits),
                datasource=f"digits_{kind}_{question}",
                solution=solution_of(question, digits),
            )

    def _draw(self, fewest: int, most: int, *, split: Split, rng: random.Random) -> tuple[Question, tuple[int, ...]]:
        """A question and `fewest` to `most` digits in order that belong to `split`."""
        while True:
            question = rng.choice(QUESTIONS)
            digits = tuple(rng.randrange(10) for _ in range(rng.randint(fewest, most)))
            if split_of(combination(question, digits)) == split:
                return question, digits

    def _as_text(self, question: Question, digits: tuple[int, ...], *, split: Split, rng: random.Random) -> str:
        names = [DIGIT_WORDS[digit] if rng.random() < self.spelled_share else str(digit) for digit in digits]
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
        return _TEXT_PROMPTS[question].format(listed)

    def _as_image(self, question: Question, digits: tuple[int, ...], *, split: Split, rng: random.Random) -> Parts:
        board = drawn(placed(digits, rows=self.page_rows, split=split, rng=rng), size_px=self.board_px)
        return [{"type": "image", "image": board}, {"type": "text", "text": _IMAGE_PROMPTS[question]}]


_TEXT_PROMPTS = {"sum": "What is the sum of {}?", "sort": "Sort {}."}
_IMAGE_PROMPTS = {"sum": "What is the sum of the digits?", "sort": "Sort the digits."}


def combination(question: Question, digits: tuple[int, ...]) -> str:
    """The name under which a combination is on one side of the train/test line: `"sum 3 7 2"`."""
    return f"{question} {_spaced(digits)}"


def answer_of(question: Question, digits: tuple[int, ...]) -> str:
    """`sum` of (3, 7, 2) → `"12"`; `sort` → `"[2, 3, 7]"` (ascending; brackets show that the order matters)."""
    if question == "sum":
        return str(sum(digits))
    return f"[{_listed(digits)}]" if len(digits) > 1 else _listed(digits)


def solution_of(question: Question, digits: tuple[int, ...]) -> str:
    """`<think>3 7 2. 3+7=10. 10+2=12.</think><answer>12</answer>`: the digits as read, then one step after another."""
    steps = [_spaced(digits)]
    if question == "sum":
        total = digits[0]
        for digit in digits[1:]:
            steps.append(f"{total}+{digit}={total + digit}")
            total += digit
    else:
        steps.append(_spaced(sorted(digits)))
    answer = answer_of(question, digits) if question == "sum" else _listed(digits)
    return f"<think>{'. '.join(steps)}.</think><answer>{answer}</answer>"


def _listed(digits: tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(digits)))


def _spaced(digits: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(str, digits))


TASK = DigitsTask()
