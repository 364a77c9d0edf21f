"""An environment of one turn: what reinforcement learning without an environment does, with the options of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.data.messages import Row


@dataclass(frozen=True, kw_only=True)
class SingleTurn(Environment):
    """One turn over any row, which `--reward.remote_url` judges."""

    name: ClassVar[str] = "single"

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _Once()


class _Once(Episode):
    async def answer(self, turn: Turn) -> Answered:
        return Answered()
