"""The geometry of a small line chart: everything that a template needs to draw it as SVG."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from lmm_r1.report.axis import Axis, Tick, nice_axis
from lmm_r1.report.curves import Panel, Points
from lmm_r1.report.page_text import number, percent

WIDTH, HEIGHT = 340, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 330, 10, 162

Show = Callable[[float | None], str]
HoverPoint = tuple[float, float, str, str]


@dataclass(frozen=True, kw_only=True)
class DrawnLine:
    """One line: SVG path data for its values and, where it was smoothed, for the average."""

    name: str
    style: str
    """The classes of its colour and dash pattern."""
    run: int | None
    last: str
    raw: str
    smooth: str
    dots: tuple[tuple[float, float], ...]
    """Values without a neighbour, which no path would show."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A panel in SVG units."""

    title: str
    unit: str
    label: str
    """The whole chart in one sentence, for who cannot see it."""
    low: float
    high: float
    """The values at the bottom and at the top."""
    is_share: bool
    from_zero: bool
    """The axis starts at zero wherever no value is below."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[DrawnLine, ...]
    hover: str
    """JSON for the pointer: per line its name and (x, y, step, value text) of each point."""


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
    values = _values(panel) or [0.0]
    low, high = min(values), max(values)
    if is_share and high > 0.5:
        return Axis(low=0.0, high=1.0, step=0.25, start=BOTTOM, end=TOP)
    # An axis that nearly reaches zero anyway is read more easily from zero.
    if low >= 0 and (is_share or panel.spec.from_zero or low < 0.3 * high):
        low = 0.0
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
    """Split a line where values are missing."""
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
