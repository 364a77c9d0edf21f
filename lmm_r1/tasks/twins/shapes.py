"""The tasks `count`, `compare` and `relations`: coloured shapes in the cells of a board."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from PIL import Image

from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, SHAPES, Canvas

SIDE = 4
CELL_PX = 28
Cell: TypeAlias = tuple[int, int]
Shape: TypeAlias = tuple[str, str]
"""Colour and shape."""
Board: TypeAlias = Mapping[Cell, Shape]
CELLS = tuple(itertools.product(range(SIDE), range(SIDE)))
PAIRS = tuple(itertools.product(COLOURS, SHAPES))


def words(board: Board) -> str:
    """`Row 1: red circle, -, -, blue star.`, a line for each row of cells."""
    lines = []
    for row in range(SIDE):
        cells = [" ".join(board[row, column]) if (row, column) in board else "-" for column in range(SIDE)]
        lines.append(f"Row {row + 1}: {', '.join(cells)}.")
    return "\n".join(lines)


def draw(board: Board, scale: int) -> Image.Image:
    """Return the picture."""
    canvas = Canvas(SIDE * CELL_PX, SIDE * CELL_PX, scale=scale)
    for (row, column), (colour, shape) in board.items():
        centre = ((column + 0.5) * CELL_PX, (row + 0.5) * CELL_PX)
        SHAPES[shape](canvas, centre, 10, COLOURS[colour])
    return canvas.image


def _scattered(shapes: Sequence[Shape], rng: random.Random) -> Board:
    return dict(zip(rng.sample(CELLS, len(shapes)), shapes, strict=True))


def _by_rows(board: Board, asked: Sequence[Shape]) -> list[int]:
    """How many of the asked shapes each row has."""
    return [sum(board.get((row, column)) in asked for column in range(SIDE)) for row in range(SIDE)]


def _summed(counts: Sequence[int]) -> str:
    return f"{'+'.join(map(str, counts))}={sum(counts)}"


def _plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


_MOST = {1: 3, 2: 5, 3: 7, 4: 9, 5: 11}
"""How many shapes there may be of those that are asked about, by difficulty."""


def _count(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    """As many others share the colour or the shape as have neither in common."""
    colour, shape = map(str, factors)
    answer = rng.randint(0, _MOST[level])
    near = [(str(c), str(s)) for c, s in seen if (c == colour) != (s == shape)]
    far = [(str(c), str(s)) for c, s in seen if c != colour and s != shape]
    others = [rng.choice(near if turn % 2 == 0 else far) for turn in range(level)]
    board = _scattered([(colour, shape)] * answer + others, rng)
    return TwinItem(
        facts=words(board),
        question=f"How many {colour} {_plural(shape)} are there?",
        answer=str(answer),
        choices=_MOST[level] + 1,
        thought=f"{_summed(_by_rows(board, [(colour, shape)]))}.",
        draw=lambda scale: draw(board, scale),
    )


def _compare(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    """The larger number exceeds the smaller one by less at a higher difficulty."""
    kind, first, second = map(str, factors)
    place, free = (0, tuple(SHAPES)) if kind == "colour" else (1, tuple(COLOURS))
    names = [first, second] if kind == "colour" else [_plural(first), _plural(second)]
    winner = rng.randrange(3)
    many = rng.randint(2, 2 + level)
    few = max(0, many - rng.randint(1, max(1, 4 - level)))
    numbers = (many, many) if winner == 2 else (many, few) if winner == 0 else (few, many)

    def with_trait(trait: str) -> Shape:
        other = rng.choice(free)
        return (trait, other) if place == 0 else (other, trait)

    shapes = [with_trait(trait) for trait, number in zip((first, second), numbers, strict=True) for _ in range(number)]
    thirds = [trait for trait in (COLOURS if place == 0 else SHAPES) if trait not in (first, second)]
    shapes += [with_trait(rng.choice(thirds)) for _ in range(min(2, len(CELLS) - len(shapes)))]
    board = _scattered(shapes, rng)
    counts = [_by_rows(board, [pair for pair in PAIRS if pair[place] == trait]) for trait in (first, second)]
    asked = f"{first} or more {second} shapes" if kind == "colour" else f"{names[0]} or more {names[1]}"
    answer = [*names, "equal"][winner]
    return TwinItem(
        facts=words(board),
        question=f"Are there more {asked}, or is it equal?",
        answer=answer,
        choices=3,
        thought=f"{names[0]} {_summed(counts[0])}. {names[1]} {_summed(counts[1])}.",
        draw=lambda scale: draw(board, scale),
    )


STEPS: dict[str, Cell] = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
_OTHERS = {1: 1, 2: 3, 3: 5, 4: 5, 5: 8}


def _walk(cell: Cell, steps: Sequence[str]) -> list[Cell]:
    """The cell and those after each step; they are on the board if the last one is, as no step leads back."""
    cells = [cell]
    for step in steps:
        cells.append((cells[-1][0] + STEPS[step][0], cells[-1][1] + STEPS[step][1]))
    return cells


def _relations(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    """From difficulty 4 on, the question goes over one more shape."""
    direction, anchor = map(str, factors)
    back = (-STEPS[direction][0], -STEPS[direction][1])
    steps = [direction] if level < 4 else [rng.choice([step for step in STEPS if STEPS[step] != back]), direction]
    cells = rng.choice([path for path in (_walk(cell, steps) for cell in CELLS) if path[-1] in CELLS])
    answer = rng.choice(list(COLOURS))
    others = [shape for shape in SHAPES if shape != anchor]
    board: dict[Cell, Shape] = {cell: (rng.choice(list(COLOURS)), rng.choice(others)) for cell in cells}
    board[cells[0]] = (rng.choice(list(COLOURS)), anchor)
    board[cells[-1]] = (answer, board[cells[-1]][1])
    for cell in rng.sample([cell for cell in CELLS if cell not in board], _OTHERS[level]):
        board[cell] = (rng.choice(list(COLOURS)), rng.choice(others))
    path = f"the {anchor}" if level < 4 else f"the shape {steps[0]} the {anchor}"
    read = [f"row {row + 1} column {column + 1} {' '.join(board[row, column])}" for row, column in cells]
    return TwinItem(
        facts=words(board),
        question=f"Which colour is the shape {direction} {path}?",
        answer=answer,
        choices=len(COLOURS),
        thought=f"{', '.join(read)}.",
        draw=lambda scale: draw(board, scale),
    )


_COMPARED = [("shape", *pair) for pair in itertools.combinations(SHAPES, 2)] + [
    ("colour", *pair) for pair in itertools.combinations(COLOURS, 2)
]
COUNT = TwinTask(family=Family(name="count", factors=PAIRS, make=_count))
COMPARE = TwinTask(family=Family(name="compare", factors=tuple(_COMPARED), make=_compare))
RELATIONS = TwinTask(family=Family(name="relations", factors=tuple(itertools.product(STEPS, SHAPES)), make=_relations))
