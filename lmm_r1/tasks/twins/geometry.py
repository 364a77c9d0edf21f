"""The task `geometry`: a labelled figure and a stated rule give a missing angle, perimeter or area.

Figures are schematic: the labels count, not what could be measured.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from PIL import Image

from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, Canvas, Point

_STEP = {1: 30, 2: 10, 3: 5, 4: 2, 5: 1}
"""Angles are multiples of this many degrees, by difficulty."""
_LONGEST = {1: 5, 2: 7, 3: 9, 4: 12, 5: 20}
NAMES = ("ABCD", "EFGH", "KLMN", "PQRS", "TUVW")
SMALLEST = 20
"""Degrees of the smallest angle, rounded up to a multiple of the step."""


@dataclass(frozen=True)
class Figure:
    """A kind of figure: how many labels it has, what follows from them, and where they are drawn."""

    labels: int
    rule: str
    asked: str
    """The question, with `{x}` for the label of what is missing."""
    solved: Callable[[Sequence[int]], int]
    thought: str
    """With the values as positions and `{total}` for their sum."""
    outline: tuple[Point, ...]
    inner: tuple[tuple[Point, Point], ...]
    """Further lines."""
    marks: tuple[Point, ...]
    """Where the values are written; the last is that of what is missing, if an angle is."""
    corners: tuple[Point, ...]
    """Where the names are written."""


_TRIANGLE = ((70.0, 24.0), (118.0, 114.0), (22.0, 114.0))
_TRIANGLE_MARKS = ((70.0, 54.0), (94.0, 102.0), (46.0, 102.0))
_TRIANGLE_CORNERS = ((70.0, 12.0), (129.0, 124.0), (11.0, 124.0))
_BOX = ((26.0, 34.0), (114.0, 34.0), (114.0, 106.0), (26.0, 106.0))
_BOX_CORNERS = ((16.0, 24.0), (124.0, 24.0), (124.0, 116.0), (16.0, 116.0))
_LINE = ((8.0, 104.0), (132.0, 104.0))
FIGURES: dict[str, Figure] = {
    "triangle": Figure(
        labels=2,
        rule="The angles of a triangle sum to 180.",
        asked="How large is angle {x}?",
        solved=lambda known: 180 - sum(known),
        thought="{0}+{1}={total}. 180-{total}={answer}",
        outline=_TRIANGLE,
        inner=(),
        marks=_TRIANGLE_MARKS,
        corners=_TRIANGLE_CORNERS,
    ),
    "quadrilateral": Figure(
        labels=3,
        rule="The angles of a quadrilateral sum to 360.",
        asked="How large is angle {x}?",
        solved=lambda known: 360 - sum(known),
        thought="{0}+{1}+{2}={total}. 360-{total}={answer}",
        outline=((34.0, 28.0), (104.0, 34.0), (122.0, 110.0), (20.0, 110.0)),
        inner=(),
        marks=((48.0, 44.0), (92.0, 48.0), (98.0, 96.0), (42.0, 96.0)),
        corners=((28.0, 16.0), (110.0, 22.0), (130.0, 122.0), (10.0, 122.0)),
    ),
    "line": Figure(
        labels=2,
        rule="The angles on a straight line sum to 180.",
        asked="How large is angle {x}?",
        solved=lambda known: 180 - sum(known),
        thought="{0}+{1}={total}. 180-{total}={answer}",
        outline=_LINE,
        inner=(((70.0, 104.0), (38.0, 22.0)), ((70.0, 104.0), (102.0, 22.0))),
        marks=((29.0, 90.0), (70.0, 58.0), (111.0, 90.0)),
        corners=((20.0, 60.0), (70.0, 28.0), (120.0, 60.0)),
    ),
    "isosceles": Figure(
        labels=1,
        rule="The angles of a triangle sum to 180, and those at its base are equal.",
        asked="How large is the base angle {x}?",
        solved=lambda known: (180 - known[0]) // 2,
        thought="180-{0}={rest}. {rest}/2={answer}",
        outline=_TRIANGLE,
        inner=(),
        marks=(_TRIANGLE_MARKS[0], _TRIANGLE_MARKS[1]),
        corners=_TRIANGLE_CORNERS,
    ),
    "perimeter": Figure(
        labels=2,
        rule="The perimeter of a rectangle is the sum of its four sides.",
        asked="What is the perimeter of {name}?",
        solved=lambda known: 2 * sum(known),
        thought="{0}+{1}={total}. 2*{total}={answer}",
        outline=_BOX,
        inner=(),
        marks=((70.0, 20.0), (127.0, 70.0)),
        corners=_BOX_CORNERS,
    ),
    "area": Figure(
        labels=2,
        rule="The area of a rectangle is the product of two sides.",
        asked="What is the area of {name}?",
        solved=lambda known: known[0] * known[1],
        thought="{0}*{1}={answer}",
        outline=_BOX,
        inner=(),
        marks=((70.0, 20.0), (127.0, 70.0)),
        corners=_BOX_CORNERS,
    ),
}


@cache
def _known(kind: str, level: int) -> dict[int, list[tuple[int, ...]]]:
    """All values that may be given, by the answer."""
    figure = FIGURES[kind]
    if kind in ("perimeter", "area"):
        values = range(2, _LONGEST[level] + 1)
    else:
        step = _STEP[level]
        values = range(-(-SMALLEST // step) * step, 151, step if kind != "isosceles" else max(step, 2))
    # All triples of single degrees would be many: a quadrilateral has multiples of 5 at least.
    values = values[:: max(1, 5 // _STEP[level])] if figure.labels == 3 else values
    found: dict[int, list[tuple[int, ...]]] = {}
    for known in itertools.product(values, repeat=figure.labels):
        answer = figure.solved(known)
        if figure.labels != 3 and answer >= 2 or SMALLEST <= answer <= 160:
            found.setdefault(answer, []).append(known)
    return found


def _geometry(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    kind, names = map(str, factors)
    figure, possible = FIGURES[kind], _known(kind, level)
    answer = rng.choice(list(possible))
    known = rng.choice(possible[answer])
    names = names[: len(figure.corners)]
    missing = names[len(known) :][:1]
    if kind in ("perimeter", "area"):
        given = f"Rectangle {names}: sides {known[0]} and {known[1]}."
    else:
        listed = ", ".join(f"{name} {value}" for name, value in zip(names, known, strict=False))
        given = f"Angles of {names}: {listed}."
    thought = figure.thought.format(*known, total=sum(known), rest=180 - known[0], answer=answer)
    return TwinItem(
        facts=given,
        question=f"{figure.rule} {figure.asked.format(x=missing, name=names)}",
        answer=str(answer),
        choices=len(possible),
        thought=f"{thought}.",
        draw=lambda scale: draw(figure, names, known, scale),
    )


def draw(figure: Figure, names: str, known: Sequence[int], scale: int) -> Image.Image:
    """Return the figure with its names in white, the values that are given in yellow, and nothing at what is missing."""
    canvas = Canvas(140, 140, scale=scale)
    canvas.line([*figure.outline, figure.outline[0]], width=2)
    for ends in figure.inner:
        canvas.line(ends, width=2)
    for name, place in zip(names, figure.corners, strict=True):
        canvas.text(name, place, dot=2)
    for value, place in zip(known, figure.marks, strict=False):
        canvas.text(str(value), place, COLOURS["yellow"], dot=2 if value < 100 else 1)
    return canvas.image


GEOMETRY = TwinTask(family=Family(name="geometry", factors=tuple(itertools.product(FIGURES, NAMES)), make=_geometry))
