"""The task `digits_table`: a square table of handwritten digits, of which a cell is read or a row or column added up.

Each row carries the table, so that a tool can give the value of a cell.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image

from lmm_r1.tasks import Modality, Parts, Split, TaskRow, check_image_share, kind_of_row, split_of
from lmm_r1.tasks.digits import Page, Placement, answer_of, scan_indices, solution_of

Question = Literal["cell", "row", "column"]
QUESTIONS: tuple[Question, ...] = ("cell", "row", "column")
Table = tuple[tuple[int, ...], ...]
_PROMPTS: dict[Question, str] = {
    "cell": "Which digit is in row {row}, column {column}?",
    "row": "What is the sum of the digits in row {row}?",
    "column": "What is the sum of the digits in column {column}?",
}
LARGEST_TABLE = 9


@dataclass(frozen=True, kw_only=True)
class DigitsTableTask:
    """Train and test share neither a question on the same digits at the same place nor, in images, a scan.

    Each row has the column `table`: a list of rows of digits.
    """

    cells: int = 3
    """Cells on each side of the table."""
    cell_px: int = 28
    """Pixels on a cell's side; 28 is one visual token of a ViT with patches of 14 pixels merged 2x2."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have an image, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        check_image_share(self.image_share)
        if not 2 <= self.cells <= LARGEST_TABLE:
            raise ValueError(
                f"a table of {self.cells} x {self.cells} cells: 2 to {LARGEST_TABLE} on each side are needed"
            )
        if self.cell_px < Page().max_digit_px:
            raise ValueError(f"cells of {self.cell_px} px hold no digit of {Page().max_digit_px} px")

    def at_difficulty(self, level: int) -> DigitsTableTask:
        """The task with a table of one more cell per side than the level."""
        return replace(self, cells=level + 1)

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            rng = random.Random(f"digits_table {split} {kind} {seed} {index}")
            question, row, column, table = self._draw(split=split, rng=rng)
            asked = asked_digits(table, question=question, row=row, column=column)
            prompt = _PROMPTS[question].format(row=row, column=column)
            yield TaskRow(
                messages=[{"role": "user", "content": self._content(kind, table, prompt, split=split, rng=rng)}],
                answer=answer_of("sum", asked),
                datasource=f"digits_table_{kind}_{question}",
                solution=solution_of("sum", asked),
                columns={"table": [list(digits) for digits in table]},
            )

    def _draw(self, *, split: Split, rng: random.Random) -> tuple[Question, int, int, Table]:
        """A question, its place and a table that belong to `split`."""
        while True:
            question = rng.choice(QUESTIONS)
            row, column = rng.randint(1, self.cells), rng.randint(1, self.cells)
            table = tuple(tuple(rng.randrange(10) for _ in range(self.cells)) for _ in range(self.cells))
            digits = asked_digits(table, question=question, row=row, column=column)
            place = {"cell": f"{row} {column}", "row": f"{row}", "column": f"{column}"}[question]
            if split_of(f"table {question} {place} of {self.cells}: {digits}") == split:
                return question, row, column, table

    def _content(
        self, kind: Literal["text", "image"], table: Table, prompt: str, *, split: Split, rng: random.Random
    ) -> str | Parts:
        if kind == "text":
            lines = "\n".join(" ".join(map(str, digits)) for digits in table)
            return f"{lines}\n{prompt}"
        return [
            {"type": "image", "image": self._picture(table, split=split, rng=rng)},
            {"type": "text", "text": prompt},
        ]

    def _picture(self, table: Table, *, split: Split, rng: random.Random) -> Image.Image:
        page = Page(cells=self.cells, cell_px=self.cell_px)
        return page.draw(
            [
                _placed(digit, page, row=row, column=column, split=split, rng=rng)
                for row, digits in enumerate(table)
                for column, digit in enumerate(digits)
            ]
        )


def _placed(digit: int, page: Page, *, row: int, column: int, split: Split, rng: random.Random) -> Placement:
    """A random scan of the digit, in the middle of its cell."""
    size = rng.randint(page.min_digit_px, page.max_digit_px)
    margin = (page.cell_px - size) // 2
    return Placement(
        scan_index=rng.choice(scan_indices(split)[digit]),
        left=column * page.cell_px + margin,
        top=row * page.cell_px + margin,
        size=size,
    )


def asked_digits(table: Table, *, question: Question, row: int, column: int) -> tuple[int, ...]:
    """The digits that a question is about; rows and columns count from 1."""
    if question == "cell":
        return (table[row - 1][column - 1],)
    return table[row - 1] if question == "row" else tuple(digits[column - 1] for digits in table)


TASK = DigitsTableTask()
