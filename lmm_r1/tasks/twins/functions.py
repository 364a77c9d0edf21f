"""The task `function_graph`: a value of a function, given as a formula or as its graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from PIL import Image

from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, FAINT, INK, Canvas, Point

MOST = 8
"""The graph shows x and y from 0 to this."""
KINDS = ("line", "bend", "parabola", "steps")
_UNIT, _LEFT, _BOTTOM = 12, 13, 101


@dataclass(frozen=True)
class Function:
    """A function on whole numbers; None for values outside of the picture."""

    formula: str
    values: tuple[int | None, ...]


def _function(formula: str, values: Sequence[int]) -> Function:
    return Function(formula, tuple(value if 0 <= value <= MOST else None for value in values))


def _sum(first: str, number: int) -> str:
    return first if number == 0 else f"{first} {'+' if number > 0 else '-'} {abs(number)}"


@cache
def functions(kind: str, level: int) -> tuple[Function, ...]:
    """Return the functions of a kind: a higher difficulty has steeper ones."""
    xs, steepest = range(MOST + 1), 1 if level == 1 else 2 if level < 4 else 3
    slopes = [slope for slope in range(-steepest, steepest + 1) if slope]
    if kind == "line":
        return tuple(
            _function(f"f(x) = {_sum(_times(slope, 'x'), start)}", [slope * x + start for x in xs])
            for slope, start in itertools.product(slopes, range(-MOST, 3 * MOST))
        )
    places = itertools.product(slopes, range(1, MOST), range(MOST + 1))
    if kind == "bend":
        return tuple(
            _function(f"f(x) = {_sum(_times(slope, f'|x - {turn}|'), low)}", [slope * abs(x - turn) + low for x in xs])
            for slope, turn, low in places
        )
    if kind == "parabola":
        return tuple(
            _function(
                f"f(x) = {_sum(_times(slope, f'(x - {turn})^2'), low)}", [slope * (x - turn) ** 2 + low for x in xs]
            )
            for slope, turn, low in places
            if abs(slope) == 1
        )
    return tuple(
        _function(f"f(x) = {low} if x < {turn}, else {high}", [low if x < turn else high for x in xs])
        for turn, low, high in itertools.product(range(1, MOST), range(MOST + 1), range(MOST + 1))
        if low != high
    )


def _times(slope: int, term: str) -> str:
    return {1: term, -1: f"-{term}"}.get(slope, f"{slope}{term}")


@cache
def _possible(kind: str, x: int, level: int) -> dict[int, list[Function]]:
    """The functions by the answer; from difficulty 4 on it is f(f(x))."""
    found: dict[int, list[Function]] = {}
    for function in functions(kind, level):
        value = function.values[x]
        if level >= 4 and value is not None:
            value = function.values[value]
        if value is not None and sum(shown is not None for shown in function.values) > 2:
            found.setdefault(value, []).append(function)
    return found


def _function_graph(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    kind, x = str(factors[0]), int(factors[1])
    possible = _possible(kind, x, level)
    answer = rng.choice(sorted(possible))
    function = rng.choice(possible[answer])
    first = function.values[x]
    return TwinItem(
        facts=f"{function.formula}.",
        question=f"What is f({x})?" if level < 4 else f"What is f(f({x}))?",
        answer=str(answer),
        choices=len(possible),
        thought=f"f({x})={first}." + (f" f({first})={answer}." if level >= 4 else ""),
        draw=lambda scale: draw(function, scale),
    )


def draw(function: Function, scale: int) -> Image.Image:
    """Return the graph over a grid; values at whole numbers are joined by lines, except at a step."""
    canvas = Canvas(112, 112, scale=scale)
    for number in range(MOST + 1):
        across, up = _LEFT + number * _UNIT, _BOTTOM - number * _UNIT
        canvas.line([(across, _BOTTOM - MOST * _UNIT), (across, _BOTTOM)], FAINT if number else INK)
        canvas.line([(_LEFT, up), (_LEFT + MOST * _UNIT, up)], FAINT if number else INK)
        canvas.text(str(number), (across, 107))
        canvas.text(str(number), (5, up))
    points = [
        None if value is None else (float(_LEFT + x * _UNIT), float(_BOTTOM - value * _UNIT))
        for x, value in enumerate(function.values)
    ]
    for start, end in itertools.pairwise(points):
        if start and end and not ("if" in function.formula and start[1] != end[1]):
            canvas.line([start, end], COLOURS["yellow"], width=2)
    shown: list[Point] = [point for point in points if point]
    for point in shown:
        canvas.disc(point, 2, COLOURS["black"])
    return canvas.image


FUNCTION_GRAPH = TwinTask(
    family=Family(
        name="function_graph", factors=tuple(itertools.product(KINDS, range(MOST + 1))), make=_function_graph
    )
)
