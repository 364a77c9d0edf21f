"""A linear axis with round ticks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

INTERVALS = 4
# Closer values than this lie at one place; a quarter of a smaller span could be zero.
SMALLEST_SPAN = 1e-300


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place on an axis, in SVG units."""

    place: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Values from `low` to `high`, drawn from `start` to `end`, with a tick at every multiple of `step`."""

    low: float
    high: float
    step: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return where a value lies, in SVG units."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, text: Callable[[float], str]) -> list[Tick]:
        """Return the multiples of the step within the axis, labelled by `text`."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        values = [index * self.step for index in range(first, last + 1)]
        return [Tick(place=round(self.place(value), 1), label=text(_clean(value, step=self.step))) for value in values]


def nice_axis(low: float, high: float, *, start: float, end: float, tight: bool = False, whole: bool = False) -> Axis:
    """Return an axis that covers `low` to `high` with about four round intervals.

    Args:
        tight: end exactly at low and high instead of at the next ticks.
        whole: never put ticks closer than 1.
    """
    if high - low <= max(1e-12 * max(abs(low), abs(high)), SMALLEST_SPAN):
        margin = 1.0 if whole or low == 0 else abs(low) / 2
        low, high = low - margin, high + margin
    step = _nice_step((high - low) / INTERVALS)
    if whole:
        step = max(1.0, step)
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low=low, high=high, step=step, start=start, end=end)


def _nice_step(rough: float) -> float:
    power = 10 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _clean(value: float, *, step: float) -> float:
    """Take off the rounding error of a multiple of the step, so that 0.30000000000000004 reads 0.3."""
    digits = 2 - math.floor(math.log10(step))
    return round(value, digits)
