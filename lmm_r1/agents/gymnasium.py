"""The environment `gymnasium`: actions are parsed from text, observations become text and images."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Episode, OwnThread, Turn, with_parts
from lmm_r1.data.messages import ImagePart, Part, Row, TextPart
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from gymnasium import Env, Space


_ACTION = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.DOTALL | re.IGNORECASE)
# Some text renderings mark the player only by colour.
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MOST_LISTED = 30
"""The largest number of actions that are listed."""
_PICTURE_SIDE = 8
"""The smallest side of a byte array that is shown as an image."""


class ActionWords:
    """The textual form of the actions of a discrete space, by names or numbers, or of a text space."""

    def __init__(self, space: Any, *, names: Sequence[str], of: str) -> None:
        """Args:
            names: names of the actions of a discrete space, in its order; empty for numbers.
            of: the environment, for messages.

        Raises:
            UserError: the actions have no textual form, or the names do not match.
        """
        from gymnasium import spaces

        self._space = space
        self._actions: dict[str, int] = {}
        self.told = "Write your next action in <action> </action>."
        """The explanation for the policy."""
        if isinstance(space, spaces.Discrete):
            size, start = int(space.n), int(space.start)
            listed = list(names) or [str(start + place) for place in range(size)]
            self._actions = {name.casefold(): start + place for place, name in enumerate(listed)}
            if not len(listed) == len(self._actions) == size:
                raise UserError(f"actions {listed}: {of} has {size} actions; give each a different name")
            known = ", ".join(listed) if size <= _MOST_LISTED else f"{listed[0]} to {listed[-1]}"
            self.told = f"Write your next action as <action>{listed[0]}</action>. The actions are: {known}."
        elif names or not isinstance(space, spaces.Text):
            raise UserError(
                f"the actions of {of} are {space}, but only Discrete spaces have names, and only Discrete and Text spaces "
                "have a textual form; register a wrapper with one of these"
            )

    def read(self, text: str) -> Any:
        """Return the last action in a turn; raises ValueError with the reason if there is none."""
        written = _ACTION.findall(text)
        if not written:
            raise ValueError(f"no <action> was found. {self.told}")
        word = written[-1].strip()
        if not self._actions and self._space.contains(word):
            return word
        if word.casefold() in self._actions:
            return self._actions[word.casefold()]
        raise ValueError(f"there is no such action. {self.told}")


def observed(space: Space, value: Any) -> list[Part]:
    """Return an observation as text and images; byte arrays with 1, 3 or 4 channels are images."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts: list[Part] = []
        for name, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            parts += [TextPart(f"\n{name}: " if parts else f"{name}: "), *observed(part, value[name])]
        return parts
    if not isinstance(value, np.ndarray):
        return [TextPart(str(value))]
    is_picture = value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] in (1, 3, 4)
    if is_picture and min(value.shape[:2]) >= _PICTURE_SIDE:
        return [ImagePart(frame(value))]
    return [TextPart(np.array2string(value, precision=4, suppress_small=True, separator=", ", threshold=10_000))]


def frame(pixels: Any) -> Image.Image:
    """Return pixels (H, W, C) as an image; raises ValueError if there are none."""
    if isinstance(pixels, (list, tuple)) and pixels:
        pixels = pixels[-1]
    if not isinstance(pixels, np.ndarray):
        raise ValueError(f"the environment renders a {type(pixels).__name__}, not pixels")
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return Image.fromarray(np.ascontiguousarray(pixels.astype(np.uint8))).convert("RGB")


def plain(rendered: Any) -> str:
    """Return text rendered for a terminal, with coloured parts in brackets; raises ValueError if there is none."""
    if isinstance(rendered, (list, tuple)) and rendered:
        rendered = rendered[-1]
    if hasattr(rendered, "getvalue"):
        rendered = rendered.getvalue()
    if not isinstance(rendered, str):
        raise ValueError(f"the environment renders a {type(rendered).__name__}, not text")
    return _CONTROL.sub("", _COLOURED.sub(r"[\1]", rendered)).strip("\n")


SEED_COLUMN = "seed"
Rendered = Literal["nothing", "image", "text"]
_RENDER_MODES: dict[Rendered, str] = {"image": "rgb_array", "text": "ansi"}


class GymnasiumEnvironment(Environment):
    """Each turn of the policy is one step: its last action in `<action> </action>`.

    All samples of a row start in the same state, by the row's column `seed` or its location; later randomness differs
    between samples. Parts of the reward: `env_reward` of every step. Counts: `steps`, `malformed_actions`, `terminated`,
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
        """Create the environment once, to check it.

        Args:
            id: the registered id; `MODULE:ID` imports the module first.
            arguments: for `gymnasium.make`.
            actions: names of the actions of a discrete space, in its order; without them they are numbers.
            render: whether `env.render()` is shown for each state, as an image or as text.
            observation: whether the observation is shown; None shows it only if nothing is rendered.
            instructions: text for the policy before the explanation of actions.

        Raises:
            UserError: Gymnasium is not installed, or this environment cannot be created or has no textual actions.
        """
        if render not in get_args(Rendered):
            raise UserError(f"render {render!r} must be one of {', '.join(get_args(Rendered))}")
        self.id = id
        self.arguments = dict(arguments or {})
        self.render = render
        self.shows_observation = render == "nothing" if observation is None else observation
        env = self.make()
        try:
            self.words = ActionWords(env.action_space, names=actions, of=id)
        finally:
            env.close()
        self.instructions = f"{instructions}\n{self.words.told}".strip()

    def make(self) -> Env:
        """Return a new environment of Gymnasium; raises UserError if it cannot be created."""
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise UserError(
                "this environment needs the package gymnasium; install it: pip install 'gymnasium>=1.0'"
            ) from error
        mode = {} if self.render == "nothing" else {"render_mode": _RENDER_MODES[self.render]}
        try:
            return gymnasium.make(self.id, **{**mode, **self.arguments})
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(
                f"Gymnasium cannot create {self.id} with {self.arguments} ({type(error).__name__}: {error})"
            ) from error

    def shown_row(self, row: Row) -> Row:
        """Return the row with the explanation of actions and the first state."""
        env = self.make()
        try:
            first, _ = env.reset(seed=_seed_of(row))
            seen = self.seen(env, first)
        finally:
            env.close()
        return with_parts(row, (TextPart(f"\n{self.instructions}\n"), *seen))

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode; raises UserError if the row's seed is invalid."""
        return _GymnasiumEpisode(self, row, row_seed=_seed_of(row), seed=seed)

    def seen(self, env: Env, observation: Any) -> tuple[Part, ...]:
        """Return a state as shown to the policy."""
        parts: list[Part] = []
        if self.shows_observation:
            parts += [TextPart("Observation: "), *observed(env.observation_space, observation)]
            parts += [] if self.render == "nothing" else [TextPart("\n")]
        if self.render == "image":
            parts.append(ImagePart(frame(env.render())))
        elif self.render == "text":
            parts.append(TextPart(plain(env.render())))
        return tuple(parts)


class _GymnasiumEpisode(Episode):
    def __init__(self, source: GymnasiumEnvironment, row: Row, *, row_seed: int, seed: int) -> None:
        self.source = source
        self.prefill = row.prefill
        self.row_seed = row_seed
        self.seed = seed
        self.env: Env | None = None
        # Environments that render need all calls in one thread.
        self._thread = OwnThread(source.name)

    async def answer(self, turn: Turn) -> Answered:
        try:
            action = self.source.words.read(turn.text)
        except ValueError as error:
            told = (TextPart(f"Nothing was done: {error}."),)
            return Answered(shown=told, prefill=self.prefill, counts={"malformed_actions": 1})
        return await self._thread.run(lambda: self._step(action))

    def branch(self) -> Episode:
        """Return a copy with a copy of the environment in the same random state, and its own thread."""
        branch = copy(self)
        branch.env, branch._thread = deepcopy(self.env), OwnThread(self.source.name)
        return branch

    async def close(self) -> None:
        if self.env is not None:
            # Not awaited, because a hanging environment would hang here, too.
            self._thread.run(self.env.close)
        self._thread.end()

    def _step(self, action: Any) -> Answered:
        if self.env is None:
            from gymnasium.utils import seeding

            self.env = self.source.make()
            self.env.reset(seed=self.row_seed)
            self.env.unwrapped.np_random, _ = seeding.np_random(self.seed)
        observation, reward, terminated, truncated, _ = self.env.step(action)
        if not math.isfinite(reward):
            raise ValueError(f"{self.source.id} gives the reward {reward}")
        return Answered(
            shown=() if terminated or truncated else self.source.seen(self.env, observation),
            prefill=self.prefill,
            rewards={"env_reward": float(reward)},
            counts={"steps": 1, "terminated": int(terminated), "truncated": int(truncated)},
        )


def _seed_of(row: Row) -> int:
    """Return the seed of a row's episodes; raises UserError if its column is invalid."""
    given = row.columns.get(SEED_COLUMN)
    if given is None:
        return zlib.crc32(row.location.encode())
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise UserError(f'{row.location}: the column "{SEED_COLUMN}" is {given!r}; a seed is a whole number from 0 up')
    return given
