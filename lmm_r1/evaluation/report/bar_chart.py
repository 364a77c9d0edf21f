"""The geometry of the grouped bars: held-out accuracy per stage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.evaluation.report.axis import Axis, Tick
from lmm_r1.evaluation.report.number_text import percent
from lmm_r1.evaluation.report.stage_table import HeldOut, StageRow

LEFT, TOP, BOTTOM, HEIGHT = 38, 18, 208, 238
BAR_WIDTH, BAR_GAP, GROUP_GAP = 34, 6, 34
LABEL_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One accuracy with the interval in which it lies at 95 % confidence, in SVG units."""

    file: str
    x: float
    y: float
    height: float
    value: str
    low: float
    high: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """The bars of one stage."""

    name: str
    label: str
    center: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Groups of bars in SVG units."""

    width: float
    files: tuple[str, ...]
    y_ticks: tuple[Tick, ...]
    groups: tuple[Group, ...]
    label: str


def bar_chart(rows: Sequence[StageRow], *, files: Sequence[str]) -> BarChart | None:
    """Return the drawing of the stages that were evaluated, None if none was."""
    evaluated = [row for row in rows if any(_accuracy(cell) is not None for cell in row.held_out)]
    if not evaluated:
        return None
    group_width = len(files) * (BAR_WIDTH + BAR_GAP) - BAR_GAP
    axis = Axis(low=0.0, high=1.0, step=0.25, start=BOTTOM, end=TOP)
    # A label needs about seven units per letter.
    pitch = max(group_width + GROUP_GAP, 7 * max(len(_label(row.name)) for row in evaluated) + 8)
    groups = tuple(
        _group(row, center=LEFT + (index + 0.5) * pitch, width=group_width, axis=axis)
        for index, row in enumerate(evaluated)
    )
    return BarChart(
        width=LEFT + len(evaluated) * pitch + 4,
        files=tuple(files),
        y_ticks=tuple(axis.ticks(lambda share: f"{100 * share:.0f}%")),
        groups=groups,
        label="Held-out accuracy. " + "; ".join(bar.title for group in groups for bar in group.bars),
    )


def wilson_interval(share: float, *, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share seen in `count` rows (Wilson, 1927, J. Am. Stat. Assoc. 22)."""
    if count == 0:
        return 0.0, 1.0
    z = 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _group(row: StageRow, *, center: float, width: float, axis: Axis) -> Group:
    cells = enumerate(row.held_out)
    bars = (
        _bar(cell, stage=row.name, x=center - width / 2 + index * (BAR_WIDTH + BAR_GAP), axis=axis)
        for index, cell in cells
        if _accuracy(cell) is not None
    )
    return Group(name=row.name, label=_label(row.name), center=center, bars=tuple(bars))


def _bar(cell: HeldOut, *, stage: str, x: float, axis: Axis) -> Bar:
    accuracy = cell.scores.accuracy
    low, high = wilson_interval(accuracy, count=cell.scores.rows)
    top = axis.place(accuracy)
    return Bar(
        file=cell.file,
        x=x,
        y=round(top, 1),
        height=round(BOTTOM - top, 1),
        value=f"{100 * accuracy:.1f}",
        low=round(axis.place(low), 1),
        high=round(axis.place(high), 1),
        title=f"{stage}, {cell.file}: {percent(accuracy)} of {cell.scores.rows} rows "
        f"(95 % interval {percent(low)} to {percent(high)})",
    )


def _accuracy(cell: HeldOut) -> float | None:
    return cell.scores.accuracy if cell.scores else None


def _label(name: str) -> str:
    return name if len(name) <= LABEL_LENGTH else f"{name[: LABEL_LENGTH - 1]}\N{HORIZONTAL ELLIPSIS}"
