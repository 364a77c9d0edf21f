"""When a stage's rollouts were generated and its updates made, where both go on at the same time: two bars for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.records.metrics import SPAN_PREFIX, MetricLog, MetricRow
from lmm_r1.report.line_chart import Tick, nice_axis
from lmm_r1.report.overlay import COLORS
from lmm_r1.report.page_text import duration

# More steps than these would be thinner than their numbers.
MAX_STEPS = 24
WIDTH, LEFT, RIGHT, BOTTOM = 720, 78, 708, 84
LANES = {"generation": 8.0, "update": 46.0}
LANE_HEIGHT = 28.0


@dataclass(frozen=True, kw_only=True)
class TimeBar:
    """A part of one step, in SVG units."""

    x: float
    y: float
    width: float
    color: int
    """The same for both bars of a step."""
    step: int
    is_named: bool
    """Whether the step's number has room in it."""
    title: str


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """The last steps of a stage over its seconds, in SVG units."""

    bars: tuple[TimeBar, ...]
    ticks: tuple[Tick, ...]
    label: str
    """The whole drawing in one sentence."""


def time_line(metrics: MetricLog) -> TimeLine | None:
    """Return the drawing of a stage's last steps; None where it has not noted when their parts were made."""
    steps = [row for row in metrics.rows if all(_span(row, lane) for lane in LANES)][-MAX_STEPS:]
    if not steps:
        return None
    spans = [span for row in steps for lane in LANES if (span := _span(row, lane))]
    low, high = min(began for began, _ in spans), max(ended for _, ended in spans)
    axis = nice_axis(low, high, start=LEFT, end=RIGHT, tight=True)
    bars = []
    for row in steps:
        for lane, y in LANES.items():
            span = _span(row, lane)
            assert span is not None, "steps without were left out"
            x, end = (round(axis.place(at), 1) for at in span)
            bars.append(
                TimeBar(
                    x=x,
                    y=y,
                    width=max(round(end - x, 1), 0.5),
                    color=row.step % COLORS + 1,
                    step=row.step,
                    is_named=end - x >= 8 * len(str(row.step)) + 4,
                    title=f"{lane} of step {row.step}: {span[1] - span[0]:.1f} s",
                )
            )
    return TimeLine(bars=tuple(bars), ticks=tuple(axis.ticks(duration)), label=_label(steps, seconds=high - low))


def _span(row: MetricRow, lane: str) -> tuple[float, float] | None:
    began, ended = (row.values.get(f"{SPAN_PREFIX}{lane}_{end}") for end in ("began", "ended"))
    return None if began is None or ended is None else (began, ended)


def _label(steps: Sequence[MetricRow], *, seconds: float) -> str:
    told = {lane: sum(span[1] - span[0] for row in steps if (span := _span(row, lane))) for lane in LANES}
    busy = ", ".join(f"{lane} {duration(total)}" for lane, total in told.items())
    return f"Steps {steps[0].step} to {steps[-1].step} in {duration(seconds)}: {busy}"
