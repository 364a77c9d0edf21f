"""Training curves of several runs on shared axes, one metric per chart, and the time line of a stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lmm_r1.evaluation.page_parts import duration
from lmm_r1.records.metrics import SPAN_PREFIX, MetricLog, MetricRow
from lmm_r1.records.run import Stage
from lmm_r1.report.curves import (
    PANELS,
    TIMING_PREFIX,
    Panel,
    PanelSpec,
    drawn_line,
    is_share,
    is_worth_showing,
)
from lmm_r1.report.line_chart import Tick, nice_axis
from lmm_r1.report.stages import StageMatch

COLORS = 8
DASHES = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The curve of one stage of one run."""

    name: str
    run: int
    dash: int
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """Stages whose curves share their axes."""

    title: str
    curves: tuple[Curve, ...]
    panels: tuple[Panel, ...]
    other_panels: tuple[Panel, ...]
    """Metrics of lesser interest, and unknown ones."""


def run_color(run: int) -> int:
    """Return the colour of a run on the whole page, from 1 to 8."""
    return run % COLORS + 1


def overlays(matches: Sequence[StageMatch], *, names: Sequence[str]) -> list[Overlay]:
    """Return one overlay for each stage that several runs have, and one for all stages that only one run has."""
    shared = [match for match in matches if len(_stages(match)) > 1]
    drawn = [_overlay(match.name, curves=_matched(match, names=names)) for match in shared]
    single = [(match.name, run, stage) for match in matches if match not in shared for run, stage in _stages(match)]
    if single:
        title = "Stages that only one run has" if shared else "Stages"
        drawn.append(_overlay(title, curves=_unmatched(single, names=names)))
    return drawn


def _stages(match: StageMatch) -> list[tuple[int, Stage]]:
    return [(run, row.stage) for run, row in match.rows.items() if row.stage]


def _matched(match: StageMatch, *, names: Sequence[str]) -> list[Curve]:
    return [Curve(name=names[run], run=run, dash=_turn(run), stage=stage) for run, stage in _stages(match)]


def _unmatched(single: Sequence[tuple[str, int, Stage]], *, names: Sequence[str]) -> list[Curve]:
    """Return curves; those of one run share its colour and differ in their dashes."""
    earlier: dict[int, int] = {}
    curves = []
    for stage_name, run, stage in single:
        dash = (_turn(run) + earlier.get(run, 0)) % DASHES
        curves.append(Curve(name=f"{names[run]}: {stage_name}", run=run, dash=dash, stage=stage))
        earlier[run] = earlier.get(run, 0) + 1
    return curves


def _turn(run: int) -> int:
    """Return the dash pattern of a run: after eight runs, colours repeat with dashes."""
    return run // COLORS % DASHES


def _overlay(title: str, *, curves: Sequence[Curve]) -> Overlay:
    names = dict.fromkeys(name for curve in curves for name in curve.stage.metrics.names)
    known = [single for spec in PANELS for single in _singles(spec, names=names)]
    main = [panel for spec in known if is_worth_showing(panel := _panel(spec, curves=curves))]
    shown = {panel.spec.metrics[0] for panel in main}
    rest = [_rest(metric) for metric in names if metric not in shown]
    return Overlay(
        title=title,
        curves=tuple(curves),
        panels=tuple(main),
        other_panels=tuple(_panel(spec, curves=curves) for spec in rest),
    )


def _singles(spec: PanelSpec, *, names: Collection[str]) -> list[PanelSpec]:
    """Return a panel for each metric of this panel that occurs; a single one keeps the title."""
    found = [metric for metric in spec.metrics if metric in names]
    titles = [spec.title] if len(found) == 1 else [metric.replace("_", " ").capitalize() for metric in found]
    return [replace(spec, title=title, metrics=(metric,)) for title, metric in zip(titles, found, strict=True)]


def _rest(metric: str) -> PanelSpec:
    is_timing = metric.startswith(TIMING_PREFIX)
    unit = "seconds" if is_timing else ""
    return PanelSpec(title=metric, unit=unit, metrics=(metric,), from_zero=is_timing, is_share=is_share(metric))


def _panel(spec: PanelSpec, *, curves: Sequence[Curve]) -> Panel:
    (metric,) = spec.metrics
    found = ((curve, points) for curve in curves if (points := curve.stage.metrics.series(metric)))
    lines = (
        drawn_line(
            points,
            smoothed=spec.smoothed,
            name=curve.name,
            color=run_color(curve.run),
            run=curve.run,
            dash=curve.dash,
        )
        for curve, points in found
    )
    return Panel(spec=spec, lines=tuple(lines))


# With more steps, a step would be narrower than its number.
MAX_STEPS = 24
WIDTH, LEFT, RIGHT, BOTTOM = 720, 78, 708, 84
LANES = {"generation": 8.0, "update": 46.0}
LANE_HEIGHT = 28.0


@dataclass(frozen=True, kw_only=True)
class TimeBar:
    """One part of a step, in SVG units."""

    x: float
    y: float
    width: float
    color: int
    """The same for both bars of a step."""
    step: int
    is_named: bool
    """Whether the step's number fits into it."""
    title: str


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """The last steps of a stage over its seconds, in SVG units."""

    bars: tuple[TimeBar, ...]
    ticks: tuple[Tick, ...]
    label: str
    """The whole drawing in one sentence."""


def time_line(metrics: MetricLog) -> TimeLine | None:
    """Return the drawing of a stage's last steps; None if it did not record the times of their parts."""
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
            assert span is not None, "steps without spans are left out"
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
    totals = {lane: sum(span[1] - span[0] for row in steps if (span := _span(row, lane))) for lane in LANES}
    busy = ", ".join(f"{lane} {duration(total)}" for lane, total in totals.items())
    return f"Steps {steps[0].step} to {steps[-1].step} in {duration(seconds)}: {busy}"
