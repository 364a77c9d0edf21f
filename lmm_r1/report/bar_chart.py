"""The geometry of grouped bars: held-out accuracy per stage with its confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.evaluation.page_parts import percent, percent_text
from lmm_r1.records.metrics import FileScores
from lmm_r1.report.line_chart import Axis, Tick

LEFT, TOP, BOTTOM, HEIGHT = 38, 18, 208, 238
BAR_WIDTH, NARROW_BAR_WIDTH, BAR_GAP, GROUP_GAP = 34, 26, 6, 34
# Groups with more bars than this have narrow ones.
WIDE_BARS = 4
LABEL_LENGTH = 16
# The 97.5 % quantile of the normal distribution.
Z = 1.96


@dataclass(frozen=True, kw_only=True)
class BarSpec:
    """The data of one bar."""

    name: str
    color: int
    scores: FileScores | None
    """None leaves the bar's place empty."""
    run: int | None = None
    """The index of its run, if several are compared."""


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
    """Groups of bars in SVG units."""

    width: float
    y_ticks: tuple[Tick, ...]
    groups: tuple[BarGroup, ...]
    label: str


def bar_chart(stages: Sequence[tuple[str, Sequence[BarSpec]]]) -> BarChart | None:
    """Return the drawing of the stages that were evaluated, None if none was.

    Args:
        stages: one group of bars per stage, with the bars in the same order in all groups.
    """
    evaluated = [(name, bars) for name, bars in stages if any(_accuracy(bar) is not None for bar in bars)]
    if not evaluated:
        return None
    count = max(len(bars) for _, bars in evaluated)
    bar_width = BAR_WIDTH if count <= WIDE_BARS else NARROW_BAR_WIDTH
    group_width = count * (bar_width + BAR_GAP) - BAR_GAP
    axis = Axis(low=0.0, high=1.0, step=0.25, start=BOTTOM, end=TOP)
    # A label needs about seven units per character.
    pitch = max(group_width + GROUP_GAP, 7 * max(len(_label(name)) for name, _ in evaluated) + 8)
    groups = tuple(
        _group(name, bars=bars, center=LEFT + (index + 0.5) * pitch, width=group_width, bar_width=bar_width, axis=axis)
        for index, (name, bars) in enumerate(evaluated)
    )
    return BarChart(
        width=LEFT + len(evaluated) * pitch + 4,
        y_ticks=tuple(axis.ticks(lambda share: f"{100 * share:.0f}%")),
        groups=groups,
        label="Held-out accuracy. " + "; ".join(bar.title for group in groups for bar in group.bars),
    )


def _group(
    name: str, *, bars: Sequence[BarSpec], center: float, width: float, bar_width: float, axis: Axis
) -> BarGroup:
    places = [center - width / 2 + index * (bar_width + BAR_GAP) for index in range(len(bars))]
    drawn = (
        _bar(bar, stage=name, x=x, width=bar_width, axis=axis)
        for bar, x in zip(bars, places, strict=True)
        if _accuracy(bar) is not None
    )
    return BarGroup(name=name, label=_label(name), center=center, bars=tuple(drawn))


def _bar(bar: BarSpec, *, stage: str, x: float, width: float, axis: Axis) -> Bar:
    scores, accuracy = bar.scores, _accuracy(bar)
    assert scores is not None
    assert accuracy is not None
    low, high = wilson_interval(accuracy, count=scores.rows)
    top = axis.place(accuracy)
    return Bar(
        color=bar.color,
        run=bar.run,
        x=round(x, 1),
        y=round(top, 1),
        width=width,
        height=round(BOTTOM - top, 1),
        value=percent_text(accuracy),
        low=round(axis.place(low), 1),
        high=round(axis.place(high), 1),
        title=f"{stage}, {bar.name}: {percent(accuracy)} of {scores.rows} rows "
        f"(95 % interval {percent(low)} to {percent(high)})",
    )


def _accuracy(bar: BarSpec) -> float | None:
    return bar.scores.accuracy if bar.scores else None


def _label(name: str) -> str:
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
