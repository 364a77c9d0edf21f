"""The tasks `clock` and `calendar`."""

from __future__ import annotations

import itertools
import random

from PIL import Image

from lmm_r1.tasks import LEVELS
from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, FAINT, INK, Canvas, on_circle

_HALF_DAY = 12 * 60
_GRAIN = {1: 60, 2: 30, 3: 10, 4: 5, 5: 1}
"""Minutes between two times that a clock may show, by difficulty."""
SHIFTS = (0, 10, 20, 30, 40, 50)


def time_of(minutes: int) -> str:
    """`"12:05"` for 5: minutes after twelve as a clock with twelve hours shows them."""
    hour, minute = divmod(minutes % _HALF_DAY, 60)
    return f"{hour or 12}:{minute:02}"


def _clock(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    colour, shift = str(factors[0]), int(factors[1])
    shown = rng.randrange(0, _HALF_DAY, _GRAIN[level])
    hour, minute = divmod(shown, 60)
    mark, rest = divmod(minute, 5)
    short = f"{'at' if minute == 0 else 'after'} {hour or 12}"
    long = f"at {mark or 12}" + (f" and {rest} marks" if rest else "")
    answer = time_of(shown + shift)
    asked = f"does the {colour} clock show" if shift == 0 else f"will the {colour} clock show in {shift} minutes"
    later = f" {time_of(shown)}+{shift}={answer}." if shift else ""
    return TwinItem(
        facts=f"A {colour} clock: short hand {short}, long hand {long}.",
        question=f"What time {asked}?",
        answer=answer,
        choices=_HALF_DAY // _GRAIN[level],
        thought=f"hour {hour or 12}, minute {minute}.{later}",
        draw=lambda scale: draw_clock(shown, colour, scale, fine=level == LEVELS[-1]),
    )


def draw_clock(minutes: int, colour: str, scale: int, *, fine: bool) -> Image.Image:
    """Return a clock with a coloured rim and twelve numbers, each with a mark; `fine` adds a mark for every minute."""
    canvas = Canvas(112, 112, scale=scale)
    centre = (56, 56)
    canvas.disc(centre, 55, COLOURS[colour])
    canvas.disc(centre, 49, COLOURS["white"])
    for mark in range(0, 60, 1 if fine else 5):
        inner = 45 if mark % 5 else 42
        canvas.line([on_circle(centre, inner, 6 * mark), on_circle(centre, 48, 6 * mark)], COLOURS["black"])
    for hour in range(1, 13):
        canvas.text(str(hour), on_circle(centre, 36, 30 * hour), COLOURS["black"])
    hour_angle, minute_angle = minutes / 2, minutes % 60 * 6
    canvas.line([centre, on_circle(centre, 21, hour_angle)], COLOURS["red"], width=4)
    canvas.line([centre, on_circle(centre, 43, minute_angle)], COLOURS["blue"], width=2)
    canvas.disc(centre, 3, COLOURS["black"])
    return canvas.image


WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ORDINALS = ("first", "second", "third", "fourth")
_COLUMN_PX = 28


def _calendar(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    """A higher difficulty shows fewer of the month's weeks, down to the first one."""
    start, days = rng.randrange(7), rng.randint(28, 31)
    if factors[0] == "weekday":
        day = 7 * int(factors[1]) + int(factors[2])
        question, answer = f"Which weekday is day {day}?", WEEKDAYS[(start + day - 1) % 7]
        first = (day - 1) % 7 + 1
        thought = f"day {first} is {answer}. {day}={first}+{day - first}."
    else:
        nth, weekday = ORDINALS.index(str(factors[1])), WEEKDAYS.index(str(factors[2]))
        first = (weekday - start) % 7 + 1
        day = first + 7 * nth
        question, answer = f"Which day is the {factors[1]} {factors[2]}?", str(day)
        thought = f"first {factors[2]} {first}. {first}+{7 * nth}={day}."
    weeks = _weeks(start, days)[: 6 if level == 1 else 6 - level]
    lines = [" ".join(f"{day or '-'}" for day in week) for week in weeks]
    return TwinItem(
        facts="\n".join(["Mo Tu We Th Fr Sa Su", *lines]),
        question=question,
        answer=answer,
        choices=7,
        thought=thought,
        draw=lambda scale: draw_calendar(weeks, scale),
    )


def _weeks(start: int, days: int) -> list[list[int]]:
    """The days of a month by weeks, 0 for the days of other months."""
    cells = [0] * start + list(range(1, days + 1))
    cells += [0] * (-len(cells) % 7)
    return [cells[place : place + 7] for place in range(0, len(cells), 7)]


def draw_calendar(weeks: list[list[int]], scale: int) -> Image.Image:
    """Return a table of weeks below the names of the days."""
    canvas = Canvas(7 * _COLUMN_PX, 7 * _COLUMN_PX, scale=scale)
    for column, name in enumerate(WEEKDAYS):
        canvas.text(name[:2].upper(), ((column + 0.5) * _COLUMN_PX, 14), COLOURS["yellow"], dot=2)
        canvas.line([(column * _COLUMN_PX, _COLUMN_PX), (column * _COLUMN_PX, 7 * _COLUMN_PX)], FAINT)
    for row, week in enumerate(weeks):
        for column, day in enumerate(week):
            if day:
                canvas.text(str(day), ((column + 0.5) * _COLUMN_PX, (row + 1.5) * _COLUMN_PX), INK, dot=2)
    return canvas.image


CLOCK = TwinTask(family=Family(name="clock", factors=tuple(itertools.product(COLOURS, SHIFTS)), make=_clock))
CALENDAR = TwinTask(
    family=Family(
        name="calendar",
        factors=(
            *itertools.product(["weekday"], range(4), range(1, 8)),
            *itertools.product(["nth"], ORDINALS, WEEKDAYS),
        ),
        make=_calendar,
    )
)
