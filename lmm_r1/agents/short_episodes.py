"""Environments over any row: one turn, or a second one after the question 'are you sure?'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn, is_right, label_of
from lmm_r1.data.messages import Row, TextPart
from remote_rm.answers.extraction import final_answer


@dataclass(frozen=True, kw_only=True)
class SingleTurn(Environment):
    """One turn over any row, which `--reward.remote_url` judges."""

    name: ClassVar[str] = "single"

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _Once()


class _Once(Episode):
    async def answer(self, turn: Turn) -> Answered:
        return Answered()


@dataclass(frozen=True, kw_only=True)
class DoubleCheck(Environment):
    """Two turns over any row with a label.

    Parts of the reward: `accuracy` of the last answer (0 or 1), `spoiled` (-1 where the first answer was right and the last
    is not, else 0). Counted: `first_right`, `changed`, `mended`.
    """

    name: ClassVar[str] = "double-check"
    rewards: ClassVar[tuple[str, ...]] = ("accuracy", "spoiled")
    counts: ClassVar[tuple[str, ...]] = ("first_right", "changed", "mended")

    question: str = "Are you sure? Please check your work once more, and answer again."

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode of two turns; raises UserError where the row has no label."""
        return _Asked(self.question, label=label_of(row), prefill=row.prefill)


class _Asked(Episode):
    def __init__(self, question: str, *, label: str, prefill: str) -> None:
        self.question = question
        self.label = label
        self.prefill = prefill
        self.first: str | None = None

    async def answer(self, turn: Turn) -> Answered:
        right = is_right(turn.text, self.label)
        if self.first is None:
            self.first = turn.text
            return Answered(shown=(TextPart(self.question),), prefill=self.prefill, counts={"first_right": int(right)})
        was_right = is_right(self.first, self.label)
        spoiled = was_right and not right
        counts = {
            "changed": int(final_answer(self.first) != final_answer(turn.text)),
            "mended": int(right and not was_right),
        }
        return Answered(rewards={"accuracy": float(right), "spoiled": -float(spoiled)}, counts=counts)
