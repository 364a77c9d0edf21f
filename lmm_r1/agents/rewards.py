"""What environments pay: parts of a reward that change from turn to turn, and whether an answer is right."""

from __future__ import annotations

from collections.abc import Mapping

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from remote_rm.answers.accuracy import quick_match
from remote_rm.answers.extraction import final_answer


class RunningParts:
    """Pays parts as they stand: over an episode, however it ends, the sum of each is what it was at last."""

    def __init__(self) -> None:
        self._paid: dict[str, float] = {}

    def pay(self, standing: Mapping[str, float]) -> dict[str, float]:
        """Return what each part has changed by since it was last paid."""
        changes = {name: value - self._paid.get(name, 0.0) for name, value in standing.items()}
        self._paid.update(standing)
        return changes


def is_right(response: str, label: str) -> bool:
    """Whether the final answer of a response is the label, as far as rules without sympy can tell."""
    answer = final_answer(response)
    return answer is not None and bool(answer.strip()) and quick_match(answer, label) is True


def label_of(row: Row) -> str:
    """The row's label; raises UserError where it has none."""
    if not row.answer.strip():
        raise UserError(f"{row.location}: the row has no answer, which this environment compares with; fill it in")
    return row.answer
