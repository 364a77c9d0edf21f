"""What a procedural task offers, and the tasks by name: rows made from a seed, each with its answer and a solution."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file, load_user_function

Split = Literal["train", "test"]
Modality = Literal["text", "image", "mixed"]
TEST_SHARE = 0.2
# The module of each task, imported on demand, and the name of the task with its default settings there.
TASKS = {"digits": "digits:TASK", "sokoban": "sokoban:TASK", "visual_search": "visual_search:TASK"}

Parts: TypeAlias = list[dict[str, Any]]
"""The content of a message, OpenAI style: texts and images."""


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    messages: list[dict[str, Any]]
    """The prompt, OpenAI style; the source of an image part is a PIL image."""
    answer: str
    """Empty if a row has no label: then an environment judges the response by the row's state."""
    datasource: str
    solution: str
    """A worked response: what the cold start teaches. It earns the full reward."""
    turns: tuple[str, ...] = ()
    """The same in several turns, for an environment with the tools that it calls; empty if the task has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, for environments and reports: a state, boxes."""

    def record(self, *, solution: bool) -> dict[str, Any]:
        """The row as `lmm_r1.data.row_parser.parse_row` reads it; `solution` appends the solution as assistant turn."""
        turn = [{"role": "assistant", "content": self.solution}] if solution else []
        label = {"answer": self.answer} if self.answer else {}
        return {"messages": self.messages + turn, **label, "datasource": self.datasource, **self.columns}


class Task(Protocol):
    """A generator of rows. Answers are compared by the reward service's math verifier, not by the task."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    """It is a dataclass, whose fields are its settings."""

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows: the same for the same arguments, and the first of them the same for a larger `rows`.

        The items of the test split are fixed and do not depend on `seed`.
        """


@dataclass(frozen=True, kw_only=True)
class UserTask:
    """A task of a user's file: a function that yields the rows, called as `rows_of(split, modality, rows, seed)`."""

    source: str
    rows_of: Callable[[Split, Modality, int, int], Iterable[TaskRow]]

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        for row in self.rows_of(split, modality, rows, seed):
            if not isinstance(row, TaskRow):
                raise UserError(f"{self.source}: yield a lmm_r1.tools.tasks.TaskRow per row, not {type(row).__name__}")
            yield row


def get_task(name: str) -> Task:
    """The task called `name`, or of `FILE.py:NAME`; raises UserError listing the known ones."""
    if function_file(name):
        return UserTask(source=name, rows_of=load_user_function(name, default="rows_of", flag="task"))
    if name not in TASKS:
        match = nearest(name, known=TASKS)
        hint = f"did you mean {match}? Known" if match else "known"
        raise UserError(
            f"unknown task {name!r}; {hint} tasks are {', '.join(TASKS)}, and FILE.py:NAME is one of your own"
        )
    module, _, task = TASKS[name].partition(":")
    return getattr(importlib.import_module(f"lmm_r1.tools.tasks.{module}"), task)


def split_of(item: str) -> Split:
    """`test` for about `TEST_SHARE` of all items, the same ones in every run.

    A hash of the item itself decides, so that no seed can move one across.
    """
    digest = hashlib.sha256(item.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64 else "train"


def kind_of_row(index: int, *, modality: Modality, image_share: float) -> Literal["text", "image"]:
    """The kind of the row at `index`; with `mixed`, a row has an image whenever the share reaches another whole number of them."""
    if modality != "mixed":
        return modality
    # Exact: in floats 100 * 0.29 is below 29. The limit brings back the fraction that was meant, as 1/3.
    share = Fraction(image_share).limit_denominator(1_000_000)
    return "image" if (index + 1) * share // 1 > index * share // 1 else "text"


def check_image_share(share: float) -> None:
    """Raises ValueError unless it is a share."""
    if not 0 <= share <= 1:
        raise ValueError(f"image_share {share} is a share: it must be from 0 to 1")
