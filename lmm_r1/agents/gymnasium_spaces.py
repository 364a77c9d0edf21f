"""Spaces of Gymnasium in words: actions read from text, observations as text and images."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from lmm_r1.data.messages import ImagePart, Part, TextPart
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from gymnasium import Space

_ACTION = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.DOTALL | re.IGNORECASE)
# Where a player stands may be told by colour alone.
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MOST_LISTED = 30
"""Actions that the policy is told one by one."""
_PICTURE_SIDE = 8
"""The smallest side of an array of bytes that is shown as an image."""
_CHANNELS = (1, 3, 4)


class ActionWords(ABC):
    """How the actions of a space are written."""

    told: str
    """What the policy is told of it."""

    def read(self, text: str) -> Any:
        """Return the last action that a turn names; raises ValueError, with what is wrong, where it names none."""
        written = _ACTION.findall(text)
        if not written:
            raise ValueError(f"no <action> was found. {self.told}")
        return self.action(written[-1].strip())

    @abstractmethod
    def action(self, word: str) -> Any:
        """Return the action of a word; raises ValueError where it is none."""


class _Named(ActionWords):
    def __init__(self, names: Sequence[str], *, start: int) -> None:
        self._actions = {name.casefold(): start + place for place, name in enumerate(names)}
        listed = ", ".join(names) if len(names) <= _MOST_LISTED else f"{names[0]} to {names[-1]}"
        self.told = f"Write your next action as <action>{names[0]}</action>. The actions are: {listed}."

    def action(self, word: str) -> Any:
        known = self._actions.get(word.casefold())
        if known is None:
            raise ValueError(f"there is no such action. {self.told}")
        return known


class _Written(ActionWords):
    told = "Write your next action in <action> </action>."

    def __init__(self, space: Any) -> None:
        self._space = space

    def action(self, word: str) -> Any:
        if not self._space.contains(word):
            raise ValueError(
                f"an action here is of {self._space.min_length} to {self._space.max_length} characters, of those that the "
                f"environment knows. {self.told}"
            )
        return word


def action_words(space: Space, *, names: Sequence[str], of: str) -> ActionWords:
    """Return how a space's actions are written.

    Args:
        names: of a discrete space, in its order; empty for its numbers.
        of: the environment, for messages.

    Raises:
        UserError: they cannot be named in text, or the names do not fit.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        size, start = int(space.n), int(space.start)
        if names and (len(names) != size or len({name.casefold() for name in names}) != size):
            raise UserError(f"actions {list(names)}: {of} has {size} actions; give each a name of its own")
        return _Named(list(names) or [str(start + place) for place in range(size)], start=start)
    if names:
        raise UserError(f"actions {list(names)}: the actions of {of} are {space}, and only discrete ones have names")
    if isinstance(space, spaces.Text):
        return _Written(space)
    raise UserError(
        f"the actions of {of} are {space}; those of a Discrete or a Text space can be named in text: register a wrapper "
        "that takes one of these"
    )


def observed(space: Space, value: Any) -> list[Part]:
    """Return an observation as text, and as images where it holds pictures: arrays of bytes with 1, 3 or 4 channels."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return _listed([(str(name), space[name], value[name]) for name in space])
    if isinstance(space, spaces.Tuple):
        return _listed([(str(place), part, value[place]) for place, part in enumerate(space)])
    if isinstance(value, np.ndarray):
        if _is_picture(value):
            return [ImagePart(frame(value))]
        return [TextPart(np.array2string(value, precision=4, suppress_small=True, separator=", ", threshold=10_000))]
    return [TextPart(str(value))]


def _listed(items: Sequence[tuple[str, Any, Any]]) -> list[Part]:
    parts: list[Part] = []
    for place, (name, space, value) in enumerate(items):
        parts.append(TextPart(f"{name}: " if place == 0 else f"\n{name}: "))
        parts += observed(space, value)
    return parts


def _is_picture(value: np.ndarray) -> bool:
    return (
        value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[-1] in _CHANNELS
        and min(value.shape[:2]) >= _PICTURE_SIDE
    )


def frame(pixels: Any) -> Image.Image:
    """Return pixels (H, W, C) as an image; raises ValueError where there are none."""
    if isinstance(pixels, (list, tuple)) and pixels:
        pixels = pixels[-1]
    if not isinstance(pixels, np.ndarray):
        raise ValueError(f"the environment renders a {type(pixels).__name__}, and pixels are asked for")
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return Image.fromarray(np.ascontiguousarray(pixels.astype(np.uint8))).convert("RGB")


def plain(rendered: Any) -> str:
    """Return text as it was rendered for a terminal, what is coloured in brackets; raises ValueError where there is none."""
    if isinstance(rendered, (list, tuple)) and rendered:
        rendered = rendered[-1]
    if hasattr(rendered, "getvalue"):
        rendered = rendered.getvalue()
    if not isinstance(rendered, str):
        raise ValueError(f"the environment renders a {type(rendered).__name__}, and text is asked for")
    return _CONTROL.sub("", _COLOURED.sub(r"[\1]", rendered)).strip("\n")
