"""Environments of Gymnasium whose actions can be named in text, with what they show as text or as rendered frames."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from lmm_r1.agents.deadlines import OwnThread
from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.agents.gymnasium_spaces import ActionWords, action_words, frame, observed, plain
from lmm_r1.agents.shown import with_parts
from lmm_r1.data.messages import ImagePart, Part, Row, TextPart
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from gymnasium import Env

SEED_COLUMN = "seed"
Rendered = Literal["nothing", "image", "text"]
_RENDER_MODES: dict[Rendered, str] = {"image": "rgb_array", "text": "ansi"}


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What a step has come to."""

    parts: tuple[Part, ...]
    reward: float
    terminated: bool
    truncated: bool


class GymnasiumEnvironment(Environment):
    """Each turn of the policy is one step: the last action that it names in `<action> </action>`.

    All samples of a row begin alike, by the row's column `seed`, or by its place in the file; chance goes on differently
    for each. Parts of the reward: `env_reward`, that of every step. Counted: `steps`, `malformed_actions`, `terminated`,
    `truncated`.
    """

    name = "gymnasium"
    rewards: ClassVar[tuple[str, ...]] = ("env_reward",)
    counts: ClassVar[tuple[str, ...]] = ("steps", "malformed_actions", "terminated", "truncated")
    stops: ClassVar[tuple[str, ...]] = ("</action>",)
    waits: ClassVar[bool] = True

    def __init__(
        self,
        *,
        id: str = "FrozenLake-v1",
        arguments: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        render: Rendered = "nothing",
        observation: bool | None = None,
        instructions: str = "",
    ) -> None:
        """Make the environment once, to see that it can be played.

        Args:
            id: as it is registered; `MODULE:ID` imports the module first.
            arguments: for `gymnasium.make`.
            actions: names of the actions of a discrete space, in its order; without them they are numbers.
            render: what is shown of each state beside its observation: `env.render()` as an image or as text.
            observation: whether the observation is shown; None where nothing is rendered.
            instructions: what the policy is told of the game, in front of how actions are written.

        Raises:
            UserError: Gymnasium is not installed, or this environment cannot be made or played.
        """
        if render not in get_args(Rendered):
            raise UserError(f"render {render!r} is none of {', '.join(get_args(Rendered))}")
        self.id = id
        self.arguments = dict(arguments or {})
        self.render = render
        self.shows_observation = render == "nothing" if observation is None else observation
        env = self.make()
        try:
            self.words: ActionWords = action_words(env.action_space, names=actions, of=id)
        finally:
            env.close()
        self.instructions = f"{instructions}\n{self.words.told}".strip()

    def make(self) -> Env:
        """Return a new environment of Gymnasium; raises UserError where there is none."""
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise UserError("it needs the package gymnasium; install it: pip install 'gymnasium>=1.0'") from error
        mode = {} if self.render == "nothing" else {"render_mode": _RENDER_MODES[self.render]}
        try:
            return gymnasium.make(self.id, **{**mode, **self.arguments})
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(
                f"Gymnasium cannot make {self.id} with {self.arguments} ({type(error).__name__}: {error})"
            ) from error

    def shown_row(self, row: Row) -> Row:
        """Return the row with how actions are written, and what is seen at first."""
        env = self.make()
        try:
            first, _ = env.reset(seed=_seed_of(row))
            seen = self.seen(env, first)
        finally:
            env.close()
        return with_parts(row, (TextPart(f"\n{self.instructions}\n"), *seen))

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode; raises UserError where the row's seed is none."""
        return _Game(self, row, row_seed=_seed_of(row), seed=seed)

    def seen(self, env: Env, observation: Any) -> tuple[Part, ...]:
        """Return what the policy is shown of a state."""
        parts: list[Part] = []
        if self.shows_observation:
            parts += [TextPart("Observation: "), *observed(env.observation_space, observation)]
            parts += [] if self.render == "nothing" else [TextPart("\n")]
        if self.render == "image":
            parts.append(ImagePart(frame(env.render())))
        elif self.render == "text":
            parts.append(TextPart(plain(env.render())))
        return tuple(parts)


class _Game(Episode):
    def __init__(self, source: GymnasiumEnvironment, row: Row, *, row_seed: int, seed: int) -> None:
        self.source = source
        self.prefill = row.prefill
        self.row_seed = row_seed
        self.seed = seed
        self.env: Env | None = None
        # Those that draw want all calls from one thread.
        self._thread = OwnThread(source.name)

    async def answer(self, turn: Turn) -> Answered:
        try:
            action = self.source.words.read(turn.text)
        except ValueError as error:
            told = (TextPart(f"Nothing was done: {error}."),)
            return Answered(shown=told, prefill=self.prefill, counts={"malformed_actions": 1})
        step = await self._thread.run(lambda: self._step(action))
        over = step.terminated or step.truncated
        return Answered(
            shown=() if over else step.parts,
            prefill=self.prefill,
            rewards={"env_reward": step.reward},
            counts={"steps": 1, "terminated": int(step.terminated), "truncated": int(step.truncated)},
        )

    def branch(self) -> Episode:
        """Return a copy with a copy of the environment, in which chance goes on alike, and a thread of its own."""
        branch = copy(self)
        branch.env, branch._thread = deepcopy(self.env), OwnThread(self.source.name)
        return branch

    async def close(self) -> None:
        if self.env is not None:
            # Not waited for: what hangs would hang here, too.
            self._thread.run(self.env.close)
        self._thread.end()

    def _step(self, action: Any) -> _Step:
        if self.env is None:
            self.env = self._begun()
        observation, reward, terminated, truncated, _ = self.env.step(action)
        if not math.isfinite(reward):
            raise ValueError(f"{self.source.id} gives the reward {reward}")
        over = terminated or truncated
        parts = () if over else self.source.seen(self.env, observation)
        return _Step(parts=parts, reward=float(reward), terminated=bool(terminated), truncated=bool(truncated))

    def _begun(self) -> Env:
        from gymnasium.utils import seeding

        env = self.source.make()
        env.reset(seed=self.row_seed)
        env.unwrapped.np_random, _ = seeding.np_random(self.seed)
        return env


def _seed_of(row: Row) -> int:
    """The seed that a row's episodes begin by; raises UserError where its column holds none."""
    given = row.columns.get(SEED_COLUMN)
    if given is None:
        return zlib.crc32(row.location.encode())
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise UserError(f'{row.location}: the column "{SEED_COLUMN}" is {given!r}; a seed is a whole number from 0 up')
    return given
