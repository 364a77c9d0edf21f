"""What people are shown of a turn beside its text: what became of the calls in it, and where its pictures were cut out."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from lmm_r1.data.messages import ImagePart

CallEnd = Literal["done", "malformed", "failed"]
"""It was carried out; or it could not be, as the policy had written it; or the tool failed."""


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What became of one call of a tool."""

    tool: str
    """Its name; empty where the call names none that there is."""
    outcome: CallEnd
    problem: str = ""
    """What went wrong, as the policy is told it; empty where nothing did."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a picture was cut out of another one of its episode."""

    picture: int
    """The other one, from 0: those of the prompt first, then those that tools have shown, in their order."""
    name: str
    """What the policy calls it: `original_image`, `observation_1`."""
    box: tuple[int, int, int, int]
    """Left, upper, right and lower edge in pixels of the other one's full resolution; right and lower are outside."""
    size: tuple[int, int]
    """The other one's width and height in full resolution."""
    keypoint: tuple[float, float] | None = None
    """The point that was asked for, where one was and not a box: x and y in the same pixels."""


@dataclass(frozen=True)
class CutImage(ImagePart):
    """A picture that knows where it was cut out."""

    _: KW_ONLY
    cut: Cut
