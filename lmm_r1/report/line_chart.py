"""The geometry of small line charts, and of axes in general, as a template needs it to draw SVG."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from lmm_r1.evaluation.page_parts import number, percent
from lmm_r1.report.curves import Panel, Points

INTERVALS = 4
# Smaller spans count as zero, because a quarter of them could be.
SMALLEST_SPAN = 1e-300
WIDTH, HEIGHT = 340, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 330, 10, 162

Show = Callable[[float | None], str]
HoverPoint = tuple[float, float, str, str]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled position on an axis, in SVG units."""

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
        """Return the position of a value, in SVG units."""
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
        whole: place ticks at least 1 apart.
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
    """Remove the rounding error of a multiple of the step: 0.30000000000000004 becomes 0.3."""
    digits = 2 - math.floor(math.log10(step))
    return round(value, digits)


@dataclass(frozen=True, kw_only=True)
class DrawnLine:
    """One line: SVG path data for its values and, if it is smoothed, for the average."""

    name: str
    style: str
    """The CSS classes of its colour and dash pattern."""
    run: int | None
    last: str
    raw: str
    smooth: str
    dots: tuple[tuple[float, float], ...]
    """Values without a neighbour, which a path would not show."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A panel in SVG units."""

    title: str
    unit: str
    label: str
    """The whole chart in one sentence, for screen readers."""
    low: float
    high: float
    """The values at the bottom and at the top."""
    is_share: bool
    from_zero: bool
    """Whether the axis starts at zero unless a value is below."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[DrawnLine, ...]
    hover: str
    """JSON for the pointer: the name of each line and (x, y, step, value text) of each point."""


def line_chart(panel: Panel) -> LineChart:
    """Return the drawing of a panel."""
    spec = panel.spec
    is_share = spec.is_share and all(0 <= value <= 1 for value in _values(panel))
    show = percent if is_share else number
    x_axis, y_axis = _x_axis(panel), _y_axis(panel, is_share=is_share)
    return LineChart(
        title=spec.title,
        unit=spec.unit,
        label=_label(panel, show=show),
        low=y_axis.low,
        high=y_axis.high,
        is_share=is_share,
        from_zero=spec.from_zero or is_share,
        x_ticks=tuple(x_axis.ticks(number)),
        y_ticks=tuple(y_axis.ticks(_tick_percent if is_share else number)),
        lines=tuple(
            DrawnLine(
                name=line.name,
                style=f"c{line.color} dash{line.dash}" if line.dash else f"c{line.color}",
                run=line.run,
                last=show(line.last),
                raw=_path(line.points, x_axis=x_axis, y_axis=y_axis),
                smooth=_path(line.smooth, x_axis=x_axis, y_axis=y_axis),
                dots=_dots(line.points, x_axis=x_axis, y_axis=y_axis),
            )
            for line in panel.lines
        ),
        hover=json.dumps(
            [
                {
                    "name": line.name,
                    "run": line.run,
                    "points": _hover(line.points, x_axis=x_axis, y_axis=y_axis, show=show),
                }
                for line in panel.lines
            ]
        ),
    )


def _x_axis(panel: Panel) -> Axis:
    steps = [step for line in panel.lines for step, _ in line.points]
    return nice_axis(min(steps), max(steps), start=LEFT, end=RIGHT, tight=True, whole=True)


def _values(panel: Panel) -> list[float]:
    return [value for line in panel.lines for _, value in line.points if value is not None]


def _y_axis(panel: Panel, *, is_share: bool) -> Axis:
    if is_share:
        return Axis(low=0.0, high=1.0, step=0.25, start=BOTTOM, end=TOP)
    values = _values(panel) or [0.0]
    low, high = min(values), max(values)
    # An axis that nearly reaches zero is easier to read from zero.
    if low >= 0 and (panel.spec.from_zero or low < 0.3 * high):
        low, high = 0.0, high or 1.0
    return nice_axis(low, high, start=BOTTOM, end=TOP)


def _tick_percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _label(panel: Panel, *, show: Show) -> str:
    ends = [
        f"{line.name} from {show(line.points[0][1])} at step {line.points[0][0]:g} "
        f"to {show(line.points[-1][1])} at step {line.points[-1][0]:g}"
        for line in panel.lines
    ]
    return f"{panel.spec.title}: {'; '.join(ends)}"


def _pieces(points: Points) -> list[list[tuple[float, float]]]:
    """Split a line at missing values."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [piece for piece in pieces if piece]


def _path(points: Points, *, x_axis: Axis, y_axis: Axis) -> str:
    return "".join(
        "M" + "L".join(f"{x_axis.place(step):.1f} {y_axis.place(value):.2f}" for step, value in piece)
        for piece in _pieces(points)
        if len(piece) > 1
    )


def _dots(points: Points, *, x_axis: Axis, y_axis: Axis) -> tuple[tuple[float, float], ...]:
    alone = (piece[0] for piece in _pieces(points) if len(piece) == 1)
    return tuple((round(x_axis.place(step), 1), round(y_axis.place(value), 1)) for step, value in alone)


def _hover(points: Points, *, x_axis: Axis, y_axis: Axis, show: Show) -> list[HoverPoint]:
    return [
        (round(x_axis.place(step), 1), round(y_axis.place(value), 2), f"{step:.0f}", show(value))
        for step, value in points
        if value is not None
    ]
