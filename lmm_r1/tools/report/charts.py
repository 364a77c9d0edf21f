"""The geometry of line charts, grouped bars and time lines, as a template needs it to draw SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmm_r1.records.metrics import SPAN_PREFIX, FileScores, MetricLog, MetricRow
from lmm_r1.tools.evaluation.page_parts import duration, number, percent, percent_text
from lmm_r1.tools.report.curves import COLORS, Panel, Points

INTERVALS = 4
# Smaller spans count as zero, because a quarter of them could be.
SMALLEST_SPAN = 1e-300

LEFT, RIGHT, TOP, BOTTOM = 54, 330, 10, 162

HoverPoint = tuple[float, float, str, str]


@dataclass(frozen=True, kw_only=True)
class Tick:
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
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, text: Callable[[float], str]) -> list[Tick]:
        """Return the multiples of the step within the axis, labelled by `text`."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        # Without the rounding error of a multiple of the step: 0.30000000000000004 becomes 0.3.
        digits = 2 - math.floor(math.log10(self.step))
        values = [index * self.step for index in range(first, last + 1)]
        return [Tick(place=round(self.place(value), 1), label=text(round(value, digits))) for value in values]


def nice_axis(low: float, high: float, *, start: float, end: float, tight: bool = False, whole: bool = False) -> Axis:
    """Return an axis that covers `low` to `high` with about four round intervals."""
    if high - low <= max(1e-12 * max(abs(low), abs(high)), SMALLEST_SPAN):
        margin = 1.0 if whole or low == 0 else abs(low) / 2
        low, high = low - margin, high + margin
    rough = (high - low) / INTERVALS
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low=low, high=high, step=step, start=start, end=end)


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A panel in SVG units."""

    panel: Panel
    x: Axis
    y: Axis
    is_share: bool

    def show(self, value: float | None) -> str:
        """Return a value as the chart writes it."""
        return percent(value) if self.is_share else number(value)

    @property
    def label(self) -> str:
        """The whole chart in one sentence, for screen readers."""
        ends = (
            f"{line.name} from {self.show(line.points[0][1])} at step {line.points[0][0]:g} "
            f"to {self.show(line.points[-1][1])} at step {line.points[-1][0]:g}"
            for line in self.panel.lines
        )
        return f"{self.panel.spec.title}: {'; '.join(ends)}"

    @property
    def x_ticks(self) -> list[Tick]:
        return self.x.ticks(number)

    @property
    def y_ticks(self) -> list[Tick]:
        return self.y.ticks((lambda share: f"{100 * share:.3g}%") if self.is_share else number)

    @property
    def hover(self) -> str:
        """JSON for the pointer: the name of each line and (x, y, step, value text) of each point."""
        return json.dumps(
            [{"name": line.name, "run": line.run, "points": self._hovered(line.points)} for line in self.panel.lines]
        )

    def _hovered(self, points: Points) -> list[HoverPoint]:
        return [
            (round(self.x.place(step), 1), round(self.y.place(value), 2), f"{step:.0f}", self.show(value))
            for step, value in points
            if value is not None
        ]

    def path(self, points: Points) -> str:
        """Return SVG path data of a line, which is broken at missing values."""
        return "".join(
            "M" + "L".join(f"{self.x.place(step):.1f} {self.y.place(value):.2f}" for step, value in piece)
            for piece in _pieces(points)
            if len(piece) > 1
        )

    def dots(self, points: Points) -> list[tuple[float, float]]:
        """Return the places of values without a neighbour, which a path would not show."""
        alone = (piece[0] for piece in _pieces(points) if len(piece) == 1)
        return [(round(self.x.place(step), 1), round(self.y.place(value), 1)) for step, value in alone]


def line_chart(panel: Panel) -> LineChart:
    steps = [step for line in panel.lines for step, _ in line.points]
    values = [value for line in panel.lines for _, value in line.points if value is not None] or [0.0]
    is_share = panel.spec.is_share and all(0 <= value <= 1 for value in values)
    low, high = min(values), max(values)
    # An axis that nearly reaches zero is easier to read from zero.
    if low >= 0 and (panel.spec.from_zero or low < 0.3 * high):
        low, high = 0.0, high or 1.0
    return LineChart(
        panel=panel,
        x=nice_axis(min(steps), max(steps), start=LEFT, end=RIGHT, tight=True, whole=True),
        y=(
            Axis(low=0.0, high=1.0, step=0.25, start=BOTTOM, end=TOP)
            if is_share
            else nice_axis(low, high, start=BOTTOM, end=TOP)
        ),
        is_share=is_share,
    )


def _pieces(points: Points) -> list[list[tuple[float, float]]]:
    """Split a line at missing values."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [piece for piece in pieces if piece]


# With more steps, a step would be narrower than its number.
MAX_STEPS = 24
TIME_LEFT, TIME_RIGHT = 78, 708
LANES = {"generation": 8.0, "update": 46.0}


@dataclass(frozen=True, kw_only=True)
class TimeBar:
    """One part of a step, in SVG units."""

    x: float
    y: float
    width: float
    color: int
    step: int
    is_named: bool
    title: str


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """The last steps of a stage over its seconds, in SVG units."""

    bars: tuple[TimeBar, ...]
    ticks: tuple[Tick, ...]
    label: str


def time_line(metrics: MetricLog) -> TimeLine | None:
    """Return the drawing of a stage's last steps; None if it did not record the times of their parts."""
    parts = [(row.step, spans) for row in metrics.rows if len(spans := _spans(row)) == len(LANES)][-MAX_STEPS:]
    if not parts:
        return None
    moments = [moment for _, spans in parts for span in spans.values() for moment in span]
    axis = nice_axis(min(moments), max(moments), start=TIME_LEFT, end=TIME_RIGHT, tight=True)
    bars = []
    for step, spans in parts:
        for lane, span in spans.items():
            x, end = (round(axis.place(at), 1) for at in span)
            bars.append(
                TimeBar(
                    x=x,
                    y=LANES[lane],
                    width=max(round(end - x, 1), 0.5),
                    color=step % COLORS + 1,
                    step=step,
                    is_named=end - x >= 8 * len(str(step)) + 4,
                    title=f"{lane} of step {step}: {span[1] - span[0]:.1f} s",
                )
            )
    totals = {lane: sum(spans[lane][1] - spans[lane][0] for _, spans in parts) for lane in LANES}
    busy = ", ".join(f"{lane} {duration(total)}" for lane, total in totals.items())
    return TimeLine(
        bars=tuple(bars),
        ticks=tuple(axis.ticks(duration)),
        label=f"Steps {parts[0][0]} to {parts[-1][0]} in {duration(max(moments) - min(moments))}: {busy}",
    )


def _spans(row: MetricRow) -> dict[str, tuple[float, float]]:
    """Return when the parts of a step began and ended, for the parts that recorded both."""
    found = {}
    for lane in LANES:
        began, ended = (row.values.get(f"{SPAN_PREFIX}{lane}_{end}") for end in ("began", "ended"))
        if began is not None and ended is not None:
            found[lane] = (began, ended)
    return found


BARS_LEFT, BARS_TOP, BARS_BOTTOM = 38, 18, 208
BAR_WIDTH, NARROW_BAR_WIDTH, BAR_GAP, GROUP_GAP = 34, 26, 6, 34
# Groups with more bars than this have narrow ones.
WIDE_BARS = 4
LABEL_LENGTH = 16
# The 97.5 % quantile of the normal distribution.
Z = 1.96


@dataclass(frozen=True, kw_only=True)
class BarSpec:
    name: str
    color: int
    scores: FileScores | None
    """None leaves the bar's place empty."""
    run: int | None = None
    """The index of its run, if several are compared."""

    @property
    def accuracy(self) -> float | None:
        return self.scores.accuracy if self.scores else None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One accuracy with its 95 % confidence interval, in SVG units."""

    color: int
    run: int | None
    x: float
    y: float
    width: float
    height: float
    value: str
    low: float
    high: float
    title: str


@dataclass(frozen=True, kw_only=True)
class BarGroup:
    """The bars of one stage."""

    name: str
    label: str
    center: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class BarChart:
    width: float
    y_ticks: tuple[Tick, ...]
    groups: tuple[BarGroup, ...]
    label: str


def bar_chart(stages: Sequence[tuple[str, Sequence[BarSpec]]]) -> BarChart | None:
    """Return the drawing of the stages that were evaluated, None if none was."""
    evaluated = [(name, bars) for name, bars in stages if any(bar.accuracy is not None for bar in bars)]
    if not evaluated:
        return None
    count = max(len(bars) for _, bars in evaluated)
    bar_width = BAR_WIDTH if count <= WIDE_BARS else NARROW_BAR_WIDTH
    group_width = count * (bar_width + BAR_GAP) - BAR_GAP
    axis = Axis(low=0.0, high=1.0, step=0.25, start=BARS_BOTTOM, end=BARS_TOP)
    # A label needs about seven units per character.
    pitch = max(group_width + GROUP_GAP, 7 * max(len(_stage_label(name)) for name, _ in evaluated) + 8)
    groups = []
    for index, (name, bars) in enumerate(evaluated):
        center = BARS_LEFT + (index + 0.5) * pitch
        drawn = [
            _bar(
                bar, stage=name, x=center - group_width / 2 + place * (bar_width + BAR_GAP), width=bar_width, axis=axis
            )
            for place, bar in enumerate(bars)
            if bar.accuracy is not None
        ]
        groups.append(BarGroup(name=name, label=_stage_label(name), center=center, bars=tuple(drawn)))
    return BarChart(
        width=BARS_LEFT + len(evaluated) * pitch + 4,
        y_ticks=tuple(axis.ticks(lambda share: f"{100 * share:.0f}%")),
        groups=tuple(groups),
        label="Held-out accuracy. " + "; ".join(bar.title for group in groups for bar in group.bars),
    )


def _bar(bar: BarSpec, *, stage: str, x: float, width: float, axis: Axis) -> Bar:
    assert bar.scores is not None
    assert bar.scores.accuracy is not None
    accuracy, rows = bar.scores.accuracy, bar.scores.rows
    low, high = wilson_interval(accuracy, count=rows)
    top = axis.place(accuracy)
    return Bar(
        color=bar.color,
        run=bar.run,
        x=round(x, 1),
        y=round(top, 1),
        width=width,
        height=round(BARS_BOTTOM - top, 1),
        value=percent_text(accuracy),
        low=round(axis.place(low), 1),
        high=round(axis.place(high), 1),
        title=f"{stage}, {bar.name}: {percent(accuracy)} of {rows} rows "
        f"(95 % interval {percent(low)} to {percent(high)})",
    )


def _stage_label(name: str) -> str:
    return name if len(name) <= LABEL_LENGTH else f"{name[: LABEL_LENGTH - 1]}\N{HORIZONTAL ELLIPSIS}"


def wilson_interval(share: float, *, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share observed in `count` rows (Wilson, 1927, J. Am. Stat. Assoc. 22)."""
    if count == 0:
        return 0.0, 1.0
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference_interval(share: float, *, count: int, reference: float, reference_count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of `share - reference` (Newcombe, 1998, Stat. Med. 17, method 10)."""
    low, high = wilson_interval(share, count=count)
    reference_low, reference_high = wilson_interval(reference, count=reference_count)
    difference = share - reference
    return (
        difference - math.hypot(share - low, reference_high - reference),
        difference + math.hypot(high - share, reference - reference_low),
    )
