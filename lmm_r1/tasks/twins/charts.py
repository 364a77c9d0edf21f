"""The tasks `bar_chart`, `line_chart` and `pie_chart`: a value, a sum or a difference is read from a chart."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from PIL import Image

from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, FAINT, INK, Canvas, Point, on_circle

LETTERS = "ABCDEF"
FACTORS: tuple[Factors, ...] = (
    *(("value", letter) for letter in LETTERS),
    *(("sum", *pair) for pair in itertools.combinations(LETTERS, 2)),
    *(("difference", *pair) for pair in itertools.permutations(LETTERS, 2)),
)
PARTS = 12
"""A pie has as many equal parts."""
Values: TypeAlias = Mapping[str, int]
_SIDE = 112
_LEFT, _BOTTOM = 14, 100
_UNIT = 10
_QUESTIONS = {"value": "What is {}?", "sum": "What is {} + {}?", "difference": "What is {} - {}?"}


def _possible(kind: str, most: int) -> dict[int, list[tuple[int, ...]]]:
    """The values of what is asked about, from 1 to `most`, by the answer; a difference is above 0."""
    if kind == "value":
        return {value: [(value,)] for value in range(1, most + 1)}
    found: dict[int, list[tuple[int, ...]]] = {}
    for first, second in itertools.product(range(1, most + 1), repeat=2):
        answer = first + second if kind == "sum" else first - second
        if answer > 0:
            found.setdefault(answer, []).append((first, second))
    return found


def _chart(
    factors: Factors,
    *,
    seen: tuple[Factors, ...],
    level: int,
    rng: random.Random,
    frame: str,
    whole: int | None,
    picture: Callable[[Values, int], Image.Image],
) -> TwinItem:
    kind, *asked = map(str, factors)
    count = min(level + (1 if whole is None else 2), len(LETTERS))
    shown = [*asked, *rng.sample([letter for letter in LETTERS if letter not in asked], max(0, count - len(asked)))]
    others = len(shown) - len(asked)
    most = 4 + level if whole is None else (whole - others) // len(asked)
    possible = _possible(kind, most)
    answer = rng.choice(list(possible))
    read = rng.choice(possible[answer])
    rest = [rng.randint(1, most) for _ in range(others)] if whole is None else _parts(whole - sum(read), others, rng)
    values = dict(sorted(zip(shown, [*read, *rest], strict=True)))
    steps = [f"{letter}={value}" for letter, value in zip(asked, read, strict=True)]
    sign = {"value": "", "sum": "+", "difference": "-"}[kind]
    if sign:
        steps.append(f"{sign.join(map(str, read))}={answer}")
    return TwinItem(
        facts=f"{frame}{', '.join(f'{letter} {value}' for letter, value in values.items())}.",
        question=_QUESTIONS[kind].format(*asked),
        answer=str(answer),
        choices=len(possible),
        thought=f"{'. '.join(steps)}.",
        draw=partial(picture, values),
    )


def _parts(total: int, count: int, rng: random.Random) -> list[int]:
    """Split a total into `count` parts of at least 1, all ways equally likely."""
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return [end - start for start, end in itertools.pairwise([0, *cuts, total])]


def _axes(scale: int) -> Canvas:
    canvas = Canvas(_SIDE, _SIDE, scale=scale)
    for value in range(10):
        height = _BOTTOM - value * _UNIT
        canvas.line([(_LEFT, height), (_SIDE - 2, height)], FAINT if value else INK)
        canvas.text(str(value), (6, height))
    canvas.line([(_LEFT, 4), (_LEFT, _BOTTOM)])
    return canvas


def _places(letters: Iterable[str]) -> dict[str, float]:
    """The middle of each letter's column."""
    named = list(letters)
    width = (_SIDE - 2 - _LEFT) / len(named)
    return {letter: _LEFT + (place + 0.5) * width for place, letter in enumerate(named)}


def draw_bars(values: Values, scale: int) -> Image.Image:
    """Return bars over a scale from 0 to 9."""
    canvas = _axes(scale)
    for (letter, middle), colour in zip(_places(values).items(), COLOURS.values(), strict=False):
        canvas.box(middle - 6, _BOTTOM - values[letter] * _UNIT, middle + 6, _BOTTOM, colour)
        canvas.text(letter, (middle, 107))
    return canvas.image


def draw_lines(values: Values, scale: int) -> Image.Image:
    """Return points joined by lines over a scale from 0 to 9."""
    canvas = _axes(scale)
    points: list[Point] = []
    for letter, middle in _places(values).items():
        points.append((middle, _BOTTOM - values[letter] * _UNIT))
        canvas.text(letter, (middle, 107))
    canvas.line(points, COLOURS["yellow"], width=2)
    for point in points:
        canvas.disc(point, 3, COLOURS["black"])
    return canvas.image


def draw_pie(values: Values, scale: int) -> Image.Image:
    """Return sectors with their letters, and lines between equal parts."""
    canvas = Canvas(_SIDE, _SIDE, scale=scale)
    centre = (_SIDE / 2, _SIDE / 2)
    angle, step = 0.0, 360 / PARTS
    for (letter, value), colour in zip(values.items(), COLOURS.values(), strict=False):
        canvas.slice(centre, 44, angle, angle + value * step, colour)
        canvas.text(letter, on_circle(centre, 50, angle + value * step / 2))
        angle += value * step
    for part in range(PARTS):
        canvas.line([centre, on_circle(centre, 44, part * step)], FAINT)
    return canvas.image


def _task(name: str, picture: Callable[[Values, int], Image.Image], *, frame: str, whole: int | None) -> TwinTask:
    return TwinTask(
        family=Family(name=name, factors=FACTORS, make=partial(_chart, frame=frame, whole=whole, picture=picture))
    )


BARS = _task("bar_chart", draw_bars, frame="Bars: ", whole=None)
LINES = _task("line_chart", draw_lines, frame="Points: ", whole=None)
PIES = _task("pie_chart", draw_pie, frame=f"Pie of {PARTS} equal parts: ", whole=PARTS)
