"""The environment `double-check`: a policy answers, is asked whether it is sure, and answers again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.data.messages import Row, TextPart
from lmm_r1.errors import UserError
from remote_rm.answers.accuracy import is_copy, is_stated, quick_match
from remote_rm.answers.extraction import final_answer


def is_right(response: str, label: str, *, prompt: str = "") -> bool:
    """Whether the final answer of a response is the label, as far as rules without sympy can tell.

    What only repeats a formula of the prompt must state the label as it is written.
    """
    answer = final_answer(response)
    if answer is None or not answer.strip():
        return False
    judge = is_stated if is_copy(answer, of=prompt, label=label) else quick_match
    return judge(answer, label) is True


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
        if not row.answer.strip():
            raise UserError(f"{row.location}: the row has no answer, which this environment compares with; fill it in")
        prompt = "\n".join(part.text for one in row.messages for part in one.parts if isinstance(part, TextPart))
        return _Asked(self.question, judge=partial(is_right, label=row.answer, prompt=prompt), prefill=row.prefill)


class _Asked(Episode):
    def __init__(self, question: str, *, judge: Callable[[str], bool], prefill: str) -> None:
        self.question = question
        self.judge = judge
        self.prefill = prefill
        self.first: str | None = None

    async def answer(self, turn: Turn) -> Answered:
        right = self.judge(turn.text)
        if self.first is None:
            self.first = turn.text
            return Answered(shown=(TextPart(self.question),), prefill=self.prefill, counts={"first_right": int(right)})
        was_right = self.judge(self.first)
        spoiled = was_right and not right
        counts = {
            "changed": int(final_answer(self.first) != final_answer(turn.text)),
            "mended": int(right and not was_right),
        }
        return Answered(rewards={"accuracy": float(right), "spoiled": -float(spoiled)}, counts=counts)
