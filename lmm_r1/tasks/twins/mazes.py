"""The task `maze`: the length of the shortest way from a corner of a maze to a coloured target."""

from __future__ import annotations

import itertools
import random
from typing import TypeAlias

from PIL import Image

from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, INK, Canvas

Cell: TypeAlias = tuple[int, int]
Way: TypeAlias = frozenset[Cell]
"""Two cells without a wall between them."""
STEPS: dict[str, Cell] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
CORNERS = ("top left", "top right", "bottom left", "bottom right")
_SIDE = 112


def _maze(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    """A maze of 3 to 7 cells on a side; its ways are a tree and, from difficulty 3 on, some further openings."""
    corner, colour = map(str, factors)
    side = level + 2
    start = (side - 1 if corner.startswith("bottom") else 0, side - 1 if corner.endswith("right") else 0)
    ways = _ways(side, extra=max(0, level - 2), rng=rng)
    paths = shortest_paths(start, ways)
    # The opposite corner is at least as far, so that each distance up to it exists.
    most = 2 * (side - 1)
    answer = rng.randint(1, most)
    target = rng.choice(sorted(cell for cell, path in paths.items() if len(path) == answer))
    free = [cell for cell in _cells(side) if cell not in (start, target)]
    others = rng.sample([name for name in COLOURS if name not in (colour, "white")], min(level, 4))
    targets = {target: colour, **dict(zip(rng.sample(free, len(others)), others, strict=True))}
    return TwinItem(
        facts=words(side, ways, targets),
        question=f"How many steps is the shortest way from the {corner} corner to {colour}?",
        answer=str(answer),
        choices=most,
        thought=f"{' '.join(paths[target])}.",
        draw=lambda scale: draw(side, ways, targets, scale),
    )


def _ways(side: int, *, extra: int, rng: random.Random) -> frozenset[Way]:
    """A random spanning tree by depth-first search, and some further ways."""
    unused = {frozenset({cell, beside}) for cell in _cells(side) for beside in _inside(cell, side)}
    stack = [(rng.randrange(side), rng.randrange(side))]
    visited, ways = set(stack), set()
    while stack:
        ahead = [cell for cell in _inside(stack[-1], side) if cell not in visited]
        if not ahead:
            stack.pop()
            continue
        cell = rng.choice(ahead)
        ways.add(frozenset({stack[-1], cell}))
        visited.add(cell)
        stack.append(cell)
    return frozenset(ways | set(rng.sample(sorted(unused - ways, key=sorted), extra)))


def _cells(side: int) -> list[Cell]:
    return [(row, column) for row in range(side) for column in range(side)]


def _inside(cell: Cell, side: int) -> list[Cell]:
    beside = [(cell[0] + row, cell[1] + column) for row, column in STEPS.values()]
    return [(row, column) for row, column in beside if 0 <= row < side and 0 <= column < side]


def shortest_paths(start: Cell, ways: frozenset[Way]) -> dict[Cell, tuple[str, ...]]:
    """Return the steps of a shortest path to each cell, by breadth-first search."""
    paths: dict[Cell, tuple[str, ...]] = {start: ()}
    newest = [start]
    while newest:
        reached = []
        for cell in newest:
            for step, (row, column) in STEPS.items():
                beside = (cell[0] + row, cell[1] + column)
                if beside not in paths and frozenset({cell, beside}) in ways:
                    paths[beside] = (*paths[cell], step)
                    reached.append(beside)
        newest = reached
    return paths


def words(side: int, ways: frozenset[Way], targets: dict[Cell, str]) -> str:
    """The maze in characters: # for walls, a dot for ways, and the first letter of a target's colour, B for black."""
    lines = []
    for row, column in itertools.product(range(2 * side + 1), repeat=2):
        if column == 0:
            lines.append("")
        cell = (row // 2, column // 2)
        if row % 2 and column % 2:
            colour = targets.get(cell, ".")
            mark = "B" if colour == "black" else colour[0]
        elif row % 2 == column % 2:
            mark = "#"
        else:
            before = (cell[0] - 1, cell[1]) if row % 2 == 0 else (cell[0], cell[1] - 1)
            mark = "." if frozenset({before, cell}) in ways else "#"
        lines[-1] += mark
    return "\n".join(lines)


def draw(side: int, ways: frozenset[Way], targets: dict[Cell, str], scale: int) -> Image.Image:
    """Return the maze with lines as walls and discs as targets."""
    canvas = Canvas(_SIDE, _SIDE, scale=scale)
    cell_px = (_SIDE - 4) / side
    edges = [2 + place * cell_px for place in range(side + 1)]
    canvas.line([(2, 2), (_SIDE - 3, 2), (_SIDE - 3, _SIDE - 3), (2, _SIDE - 3), (2, 2)], width=2)
    for row, column in _cells(side):
        if column + 1 < side and frozenset({(row, column), (row, column + 1)}) not in ways:
            canvas.line([(edges[column + 1], edges[row]), (edges[column + 1], edges[row + 1])], INK, width=2)
        if row + 1 < side and frozenset({(row, column), (row + 1, column)}) not in ways:
            canvas.line([(edges[column], edges[row + 1]), (edges[column + 1], edges[row + 1])], INK, width=2)
    for (row, column), colour in targets.items():
        centre = (edges[column] + cell_px / 2, edges[row] + cell_px / 2)
        canvas.disc(centre, cell_px * 0.3, COLOURS[colour])
    return canvas.image


MAZE = TwinTask(
    family=Family(
        name="maze",
        factors=tuple(itertools.product(CORNERS, [name for name in COLOURS if name != "white"])),
        make=_maze,
    )
)
