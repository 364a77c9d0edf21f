"""What an environment is: it shows a policy a row, answers each of its turns, and ends the episode; the simplest one."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from lmm_r1.config.checks import check_thought
from lmm_r1.config.shared import ThoughtConfig
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart
from lmm_r1.data.sample import CallOutcome
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy has said in one turn."""

    text: str
    """As it was generated, without the end token; what the turn was begun with stands in front."""
    number: int
    """Which of the episode's turns it is, from 0."""
    ended: bool
    """Whether the policy ended it itself; False where it reached its limit of tokens."""
    begun: str = ""
    """What of the text the turn was begun with."""
    parameters: SamplingParams | None = None
    """What it was sampled by, for environments that write all their text themselves (`Environment.raw`)."""


@dataclass(frozen=True, kw_only=True)
class RawText:
    """Text that goes to the tokenizer as it stands: who has written it has written the chat template's marks, too.

    It is encoded once, by itself, and stands behind the ids that are there; what it says of the end of the policy's
    turn and the beginning of the next one, or does not say, is what the policy reads.
    """

    text: str
    """Where images stand, it has what the model's chat template writes for them."""
    images: tuple[ImagePart, ...] = ()
    """In the order of their marks."""


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
    raw: RawText | None = None
    """In the place of `shown`, role and prefill: all that stands between the turn and the next."""
    parameters: SamplingParams | None = None
    """What later turns are sampled by, beside what training needs; None goes on as before."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward that this turn has earned; those of one name are summed over an episode."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What is counted and logged, and pays nothing: tool calls, malformed calls, steps."""
    calls: tuple[CallOutcome, ...] = ()
    """What became of the calls in the turn, for people to look at; the counts are what is logged."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """What is logged under `agent/NAME`, by names that the environment does not state; an episode's last ones count."""
    score: float | None = None
    """How right the episode was so far, by which groups are filtered; None: by its rewards."""

    @property
    def is_over(self) -> bool:
        """Whether the episode ends with the turn that this answers."""
        return not self.shown and self.raw is None


class Episode(ABC):
    """The state of an environment for one sample."""

    async def open(self, prompt: str) -> str:
        """Return what a raw environment begins with: the row as the chat template writes it, or what is shown instead.

        It must hold the marks of the row's images. An exception is the environment's own fault, as in `answer`.
        """
        return prompt

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
    raw: ClassVar[bool] = False
    """Whether its episodes are text that goes to the tokenizer as it stands: they `open`, and may be shown rows of plain
    text."""
    waits: ClassVar[bool] = False
    """Whether `shown_row` may take longer than a moment; it then runs in a thread, within the deadline of an answer."""

    @property
    def call_tags(self) -> tuple[str, ...]:
        """The tags of its tool calls, by which `turn_format` knows a turn that calls; by default no turn does."""
        return ()

    def derived(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """Return further numbers that an episode is logged with: the same names for all, as what was counted in it says.

        Like counts they pay nothing unless `--reward.part_weights` names them.
        """
        return {}

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


class RunningParts:
    """Pays parts as they stand: over an episode, however it ends, the sum of each is what it was at last."""

    def __init__(self) -> None:
        self._paid: dict[str, float] = {}

    def pay(self, standing: Mapping[str, float]) -> dict[str, float]:
        """Return what each part has changed by since it was last paid."""
        changes = {name: value - self._paid.get(name, 0.0) for name, value in standing.items()}
        self._paid.update(standing)
        return changes


def with_parts(row: Row, parts: tuple[Part, ...]) -> Row:
    """The row with parts added to its last turn of the user; raises UserError where it has none."""
    places = [place for place, message in enumerate(row.messages) if message.role == "user"]
    if not places:
        raise UserError(
            f"{row.location}: the prompt has no turn of the user, and this environment adds to it; write one"
        )
    last = row.messages[places[-1]]
    changed = replace(last, parts=last.parts + parts)
    return replace(row, messages=(*row.messages[: places[-1]], changed, *row.messages[places[-1] + 1 :]))


def demonstration_of(
    environment: Environment, row: Row, turns: Sequence[str], *, seed: int = 0
) -> tuple[Message, ...]:
    """Return the row as the environment shows it, the turns, and what it shows between them: a rollout that says the same.

    Args:
        turns: all that the policy says, each with what the environment begins it with.
        seed: of the episode.

    Raises:
        UserError: the episode is over before the last turn or goes on after it, or a turn has another beginning.
    """
    return _loop().run_until_complete(_played(environment, row, turns, seed=seed))


# One for all demonstrations, so that what an environment holds of a loop, such as a client, stays usable.
_loop = cache(asyncio.new_event_loop)


async def _played(environment: Environment, row: Row, turns: Sequence[str], *, seed: int) -> tuple[Message, ...]:
    messages = list(environment.shown_row(row).messages)
    place = f"{row.location}, environment {environment.name}"
    episode = environment.begin(row, seed=seed)
    answered = Answered()
    try:
        for number, text in enumerate(turns):
            if number:
                if answered.is_over:
                    raise UserError(f"{place}: the episode is over with turn {number} of the {len(turns)} worked ones")
                messages.append(Message(role=answered.role, parts=tuple(answered.shown)))
            if not text.startswith(answered.prefill):
                raise UserError(
                    f"{place}: turn {number + 1} must begin with {answered.prefill!r}, which the environment writes"
                )
            messages.append(Message(role="assistant", parts=(TextPart(text),)))
            answered = await episode.answer(Turn(text=text, number=number, ended=True))
    finally:
        await episode.close()
    if not answered.is_over:
        raise UserError(f"{place}: the episode goes on after the {len(turns)} worked turns")
    return tuple(messages)


@dataclass(frozen=True, kw_only=True)
class SingleTurn(Environment):
    """One turn over any row, which `--reward.remote_url` judges."""

    name: ClassVar[str] = "single"

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _Once()


class _Once(Episode):
    async def answer(self, turn: Turn) -> Answered:
        return Answered()
