"""Training curves of several runs on the same axes, one metric a chart."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
from lmm_r1.report.stages import StageMatch

COLORS = 8
DASHES = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One stage of one run as it is drawn."""

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
    """Of metrics that say less about a run, and of those unknown here."""


def run_color(run: int) -> int:
    """Return the colour that a run has on the whole page, from 1 to 8."""
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
    """Return curves of which those of one run share its colour and differ in their dashes."""
    earlier: dict[int, int] = {}
    curves = []
    for stage_name, run, stage in single:
        dash = (_turn(run) + earlier.get(run, 0)) % DASHES
        curves.append(Curve(name=f"{names[run]}: {stage_name}", run=run, dash=dash, stage=stage))
        earlier[run] = earlier.get(run, 0) + 1
    return curves


def _turn(run: int) -> int:
    """Return the dash pattern of a run: from the ninth on, colours come again with dashes."""
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
    """Return a panel for each metric of this one that occurs; one alone keeps the title."""
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
