"""Judges the moves of Sokoban: `<answer>Left, Up, Up</answer>` is right if it solves the level in the label.

python -m remote_rm.sokoban.verifier --port 5000
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from remote_rm import registry
from remote_rm.answer_verifier import AnswerVerifier, setting
from remote_rm.registry import positive
from remote_rm.reward_function import reward_func_of
from remote_rm.sokoban import Level, play, read_level, read_plan, solve

MAX_STATES = 50_000
"""The most states to look at in the search for a solution."""


@dataclass(frozen=True, kw_only=True)
class SokobanVerifier(AnswerVerifier):
    """Moves that push every box onto a goal; the label is a level in XSB text that is not solved yet.

    Moves that a wall or a box blocks are skipped. An answer with words that name no move is wrong.
    """

    name: ClassVar[str] = "sokoban"
    reports_ungradable: ClassVar[bool] = True

    max_moves: int = setting(50, type=positive(int), help="how many moves of an answer are made")

    def matches(self, answer: str, label: str) -> bool:
        level, plan = _level(label), read_plan(answer)
        if level is None or plan.unread:
            return False
        return play(level, plan.moves[: self.max_moves]).level.is_solved

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is a level that is not solved yet."""
        return _level(label) is not None

    def answer_of(self, label: str) -> str:
        """Return the moves of a shortest solution; the label itself if none is found."""
        level = _level(label)
        return ", ".join((level and solve(level, max_states=MAX_STATES)) or [label])


@lru_cache(maxsize=4096)
def _level(label: str) -> Level | None:
    """Return the level in a label, None if there is none or if it is solved. Cached for the other samples of the group."""
    try:
        level = read_level(label)
    except ValueError:
        return None
    return None if level.is_solved else level


VERIFIER = SokobanVerifier
reward_func = reward_func_of("sokoban")

if __name__ == "__main__":
    registry.run("sokoban", None, prog="python -m remote_rm.sokoban.verifier")
