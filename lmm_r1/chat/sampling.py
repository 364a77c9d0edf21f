"""The settings that can change in the middle of a conversation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from lmm_r1 import dotted
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled; raises UserError for values that none can be sampled with."""

    temperature: float
    top_p: float
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature:g}: must be a number from 0 (greedy) up")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p:g}: must be above 0 and at most 1")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: must be 1 or more")

    def for_one_answer(self) -> SamplingSettings:
        """Return what an engine takes."""
        return SamplingSettings(
            n_samples=1, temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens
        )


NAMES = tuple(field.name for field in fields(Sampling))
_READERS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "max_new_tokens": (int, "a whole number"),
}


def changed(sampling: Sampling, name: str, value: str) -> Sampling:
    """Return the settings with one changed; raises UserError for an unknown name and a bad value."""
    if name not in NAMES:
        match = nearest(name, known=NAMES)
        raise UserError(f"no setting {name}; " + (f"did you mean {match}?" if match else f"try {', '.join(NAMES)}"))
    read, wanted = _READERS[name]
    try:
        number = read(value)
    except ValueError as error:
        raise UserError(f"{name} {value}: {wanted} is needed") from error
    return dotted.replace(sampling, {name: number})
