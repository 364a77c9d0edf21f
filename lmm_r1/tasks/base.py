"""What a procedural task offers: rows made from a seed, with the answer and a worked solution for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Split = Literal["train", "test"]
Modality = Literal["text", "image", "mixed"]


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    messages: list[dict[str, Any]]
    """The prompt, OpenAI style; the source of an image part is a PIL image."""
    answer: str
    datasource: str
    solution: str
    """A worked response: what the cold start teaches. It earns the full reward."""

    def record(self, *, solution: bool) -> dict[str, Any]:
        """The row as `lmm_r1.data.row_parser.parse_row` reads it; `solution` appends the solution as assistant turn."""
        turn = [{"role": "assistant", "content": self.solution}] if solution else []
        return {"messages": self.messages + turn, "answer": self.answer, "datasource": self.datasource}


class Task(Protocol):
    """A generator of rows. Answers are compared by the reward service's math verifier, not by the task."""

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows: the same for the same arguments, and the first of them the same for a larger `rows`.

        What is held out for the test split is fixed and does not depend on `seed`.
        """
