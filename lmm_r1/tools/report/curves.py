"""Training curves: which metrics share a panel, how they are smoothed, and the curves of several runs on shared axes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lmm_r1.config.rewards import WEIGHT_PREFIX
from lmm_r1.records.metrics import SPAN_PREFIX, MetricLog
from lmm_r1.records.run_folder import Stage

if TYPE_CHECKING:
    from lmm_r1.tools.report import StageMatch

COLORS = 8
MAX_POINTS = 400
MIN_STEPS_TO_SMOOTH = 16
MAX_LINES = 6
HELD_OUT = re.compile(r"eval_(?P<source>.+)_pass(?P<k>\d+)")
"""Metrics of an evaluation during training, by data source."""

Point = tuple[float, float | None]
Points = Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class PanelSpec:
    """Metrics that are drawn on the same axes."""

    title: str = ""
    """Empty if each metric has a panel of its own, below the others."""
    unit: str
    metrics: tuple[str, ...]
    """Their names, in which `*` stands for any text."""
    is_share: bool = False
    from_zero: bool = False
    is_smoothed: bool = True
    hidden_at_zero: bool = False
    """Whether zeros throughout mean that it was not measured (no reference model); it is then with the other metrics."""
    section: str = ""
    """The runs that log it, as a heading of docs/metrics.md; the fields below are for that page, too."""
    when: str = ""
    optional: bool = False
    """Whether some of these runs do not log it."""
    normal: str = ""
    do: str = ""

    def found(self, names: Sequence[str]) -> list[str]:
        """Return those of the logged names that are its metrics."""
        return list(dict.fromkeys(name for pattern in self.metrics for name in fnmatch.filter(names, pattern)))


METRICS = tuple(
    PanelSpec(section=section, **row | {"metrics": tuple(row["metrics"].split())})
    for section, rows in yaml.safe_load((Path(__file__).parent / "metrics.yaml").read_text(encoding="utf-8")).items()
    for row in rows
)
"""Every metric that a training logs, except the parts that only a user's own reward has."""


def spec_of(metric: str) -> PanelSpec | None:
    """Return the row of a metric, if possible one with its full name; None for a part of a user's own reward."""
    rows = [spec for spec in METRICS if spec.found([metric])]
    return min(rows, key=lambda spec: metric not in spec.metrics, default=None)


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """One metric of a panel, or one run's values of the panel's only metric."""

    name: str
    color: int
    run: int | None = None
    dash: int = 0
    points: Points
    """(step, value), value None if the number was not finite; averaged in buckets if there are too many."""
    smooth: Points
    """A centred moving average of the points; empty for a short run."""

    @property
    def last(self) -> float | None:
        """The last value, smoothed if the line is."""
        values = [value for _, value in self.smooth or self.points if value is not None]
        return values[-1] if values else None


@dataclass(frozen=True, kw_only=True)
class Panel:
    spec: PanelSpec
    lines: tuple[CurveLine, ...]


def panels(metrics: MetricLog) -> list[Panel]:
    """Return the panels with titles."""
    names = metrics.names
    drawn = [_panel(spec, names=spec.found(names), metrics=metrics) for spec in METRICS if spec.title]
    return [panel for panel in drawn if is_worth_showing(panel)]


def is_worth_showing(panel: Panel) -> bool:
    """Return whether a panel has lines, and not only zeros that mean "not measured"."""
    is_zero = all(value == 0 for line in panel.lines for _, value in line.points)
    return bool(panel.lines) and not (panel.spec.hidden_at_zero and is_zero)


def other_panels(metrics: MetricLog) -> list[Panel]:
    """Return a panel for each metric that `panels` leaves out."""
    known = {name for panel in panels(metrics) for name in panel.spec.metrics}
    # Times are drawn on the time line.
    rest = [name for name in metrics.names if name not in known and not name.startswith(SPAN_PREFIX)]
    return [_panel(_alone(name), names=[name], metrics=metrics) for name in rest]


def _alone(metric: str) -> PanelSpec:
    return replace(spec_of(metric) or PanelSpec(unit="", metrics=()), title=metric, metrics=(metric,))


def smoothing_window(count: int) -> int:
    """Return the number of points over which a line of `count` points is averaged: odd, and 1 for a short line."""
    return 1 if count < MIN_STEPS_TO_SMOOTH else max(5, count // 12) | 1


def moving_average(points: Points, *, window: int) -> Points:
    """Return the mean over a centred window of points, truncated at both ends, ignoring None values."""
    half = window // 2
    return [(step, _mean(points[max(0, index - half) : index + half + 1])) for index, (step, _) in enumerate(points)]


def thinned(points: Points, *, limit: int) -> Points:
    """Return at most `limit` points, each the mean of neighbouring points."""
    if len(points) <= limit:
        return points
    bounds = [round(bucket * len(points) / limit) for bucket in range(limit + 1)]
    chunks = [points[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    return [(sum(step for step, _ in chunk) / len(chunk), _mean(chunk)) for chunk in chunks]


def _panel(spec: PanelSpec, *, names: Sequence[str], metrics: MetricLog) -> Panel:
    """Return the panel of these metrics, of the largest ones if they are too many."""
    if len(names) > MAX_LINES:
        names = sorted(names, key=lambda name: -(_mean(metrics.series(name)) or 0.0))[:MAX_LINES]
    lines = (
        drawn_line(metrics.series(name), smoothed=spec.is_smoothed, name=_short(name), color=color)
        for color, name in enumerate(names, start=1)
    )
    return Panel(spec=replace(spec, metrics=tuple(names)), lines=tuple(lines))


def _short(metric: str) -> str:
    held_out = HELD_OUT.fullmatch(metric)
    if held_out:
        return f"{held_out['source']}, pass@{held_out['k']}"
    if metric.startswith(WEIGHT_PREFIX):
        # The name in --reward.part_weights.
        return metric.removeprefix(WEIGHT_PREFIX)
    return metric.rpartition("/")[2].replace("_", " ")


def drawn_line(
    points: Points, *, smoothed: bool, name: str, color: int, run: int | None = None, dash: int = 0
) -> CurveLine:
    """Return the line through these values, thinned if there are too many; other arguments are those of `CurveLine`."""
    points = thinned(points, limit=MAX_POINTS)
    window = smoothing_window(len(points)) if smoothed else 1
    smooth = moving_average(points, window=window) if window > 1 else []
    return CurveLine(name=name, color=color, run=run, dash=dash, points=points, smooth=smooth)


def _mean(points: Points) -> float | None:
    values = [value for _, value in points if value is not None]
    return sum(values) / len(values) if values else None


DASHES = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
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

    @property
    def is_smoothed(self) -> bool:
        return any(smoothing_window(len(curve.stage.metrics.rows)) > 1 for curve in self.curves)


def run_color(run: int) -> int:
    """Return the colour of a run on the whole page, from 1 to 8."""
    return run % COLORS + 1


def overlays(matches: Sequence[StageMatch], *, names: Sequence[str]) -> list[Overlay]:
    """Return one overlay for each stage that several runs have, and one for all stages that only one run has."""
    drawn: list[Overlay] = []
    single: list[Curve] = []
    for match in matches:
        stages = {run: row.stage for run, row in match.rows.items() if row.stage}
        if len(stages) > 1:
            curves = [
                Curve(name=names[run], run=run, dash=run // COLORS % DASHES, stage=stage)
                for run, stage in stages.items()
            ]
            drawn.append(_overlay(match.name, curves=curves))
            continue
        for run, stage in stages.items():
            # Curves of one run share its colour and differ in their dashes.
            dash = (run // COLORS + sum(curve.run == run for curve in single)) % DASHES
            single.append(Curve(name=f"{names[run]}: {match.name}", run=run, dash=dash, stage=stage))
    if single:
        drawn.append(_overlay("Stages that only one run has" if drawn else "Stages", curves=single))
    return drawn


def _overlay(title: str, *, curves: Sequence[Curve]) -> Overlay:
    names = dict.fromkeys(name for curve in curves for name in curve.stage.metrics.names)
    known = [single for spec in METRICS if spec.title for single in _singles(spec, names=names)]
    main = [panel for spec in known if is_worth_showing(panel := _shared_panel(spec, curves=curves))]
    shown = {panel.spec.metrics[0] for panel in main}
    rest = [_alone(metric) for metric in names if metric not in shown]
    return Overlay(
        title=title,
        curves=tuple(curves),
        panels=tuple(main),
        other_panels=tuple(_shared_panel(spec, curves=curves) for spec in rest),
    )


def _singles(spec: PanelSpec, *, names: Collection[str]) -> list[PanelSpec]:
    """Return a panel for each metric of this panel that occurs; a single one keeps the title."""
    found = [metric for metric in spec.metrics if metric in names]
    titles = [spec.title] if len(found) == 1 else [metric.replace("_", " ").capitalize() for metric in found]
    return [replace(spec, title=title, metrics=(metric,)) for title, metric in zip(titles, found, strict=True)]


def _shared_panel(spec: PanelSpec, *, curves: Sequence[Curve]) -> Panel:
    (metric,) = spec.metrics
    found = ((curve, points) for curve in curves if (points := curve.stage.metrics.series(metric)))
    lines = (
        drawn_line(
            points,
            smoothed=spec.is_smoothed,
            name=curve.name,
            color=run_color(curve.run),
            run=curve.run,
            dash=curve.dash,
        )
        for curve, points in found
    )
    return Panel(spec=spec, lines=tuple(lines))
