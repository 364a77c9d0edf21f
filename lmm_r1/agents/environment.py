"""What an environment is: it shows a policy a row, answers each of its turns, and says when an episode is over."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lmm_r1.config.checks import check_thought
from lmm_r1.config.ppo import ThoughtConfig
from lmm_r1.data.messages import Part, Row
from lmm_r1.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy has said in one turn."""

    text: str
    """As it was generated, without the end token; what the turn was begun with stands in front."""
    number: int
    """Which of the episode's turns it is, from 0."""
    ended: bool
    """Whether the policy ended it itself; False where it reached its limit of tokens."""


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """How one turn of the policy is sampled, where that is not as the environment and the run have it.

    Raises UserError for options that contradict one another.
    """

    stops: tuple[str, ...] | None = None
    """Texts that end the turn, and belong to it; None takes the environment's, or none beside `regex`."""
    regex: str | None = None
    """What the whole turn must match, but for its prefill. The loss leaves such a turn out."""
    max_tokens: int | None = None
    """Longest turn in tokens, where the run allows as many; None is what the run allows."""
    thought: ThoughtConfig | None = None
    """Budget forcing of this turn; None takes that of `--agent.thought.*`, or none beside `regex`."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"TurnOptions: max_tokens {self.max_tokens} must be at least 1")
        if self.thought is not None:
            check_thought(self.thought, prefix="TurnOptions: thought.")
        if self.regex is None:
            return
        if self.thought is not None and self.thought.forces:
            raise UserError(
                "TurnOptions: regex says what the whole turn is, and thought would add to it; give one of them"
            )
        try:
            re.compile(self.regex)
        except re.error as error:
            raise UserError(f"TurnOptions: regex {self.regex!r} is no regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What an environment says to one turn."""

    shown: tuple[Part, ...] = ()
    """The content of the next message to the policy; empty where the episode is over."""
    role: str = "user"
    """Of that message."""
    prefill: str = ""
    """How the policy's next turn begins; the policy has not generated it."""
    options: TurnOptions = field(default_factory=TurnOptions)
    """How the policy's next turn is sampled."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward that this turn has earned; those of one name are summed over an episode."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What is counted and logged, and pays nothing: tool calls, malformed calls, steps."""

    @property
    def is_over(self) -> bool:
        """Whether the episode ends with the turn that this answers."""
        return not self.shown


class Episode(ABC):
    """The state of an environment for one sample."""

    @abstractmethod
    async def answer(self, turn: Turn) -> Answered:
        """Return what the environment says to a turn.

        What a policy may write is never an error: a call that cannot be read is answered, and counted. An exception is
        the environment's own fault; it ends the episode, is logged with the row, and is counted.
        """

    def branch(self) -> Episode:
        """Return a copy that goes on from here by itself; its environment and its row stay the same objects.

        An episode that holds what no copy can hold as well, a process or a connection, has one of its own or raises
        what says so.
        """
        return deepcopy(self, {id(value): value for value in vars(self).values() if isinstance(value, Row)})

    async def close(self) -> None:  # noqa: B027 - few episodes hold anything
        """Let go of what the episode holds; called once, however it has ended."""


class Environment(ABC):
    """Begins episodes; one serves all rows of a run, from several tasks of one event loop."""

    name: ClassVar[str]
    """Its name on the command line: `crop`."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Texts that end a turn where the policy writes them; they belong to the turn."""
    rewards: ClassVar[tuple[str, ...]] = ()
    """The names of all parts of the reward that its answers may give; one that an episode does not earn is 0."""
    counts: ClassVar[tuple[str, ...]] = ()
    """The names of all that its answers may count."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Environment:
        # It keeps nothing of an episode, so that copies of one share it.
        return self

    def shown_row(self, row: Row) -> Row:
        """Return the row as the policy is shown it, with what it must be told of the environment; by default as it is."""
        return row

    def first_turn(self, row: Row) -> TurnOptions:
        """Return how the first turn of an episode is sampled; the row that is shown may begin it (`Row.prefill`)."""
        return TurnOptions()

    @abstractmethod
    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return a new episode.

        Args:
            row: as it was read, not as it is shown.
            seed: its own among the samples of a group, the same in a run that was resumed.
        """
