"""A room as bits of whole numbers, which searches go through: where a player walks, and which boxes are lost."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lmm_r1.tasks.sokoban.state import Move, Room, Square, State


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Square (row, column) is bit `(row + 1) * width + column + 1`: there is a wall around, so that no shift wraps.

    Sets of squares are masks, single squares are numbers of bits, and a step is the difference of two of them.
    """

    width: int
    free: int
    """All squares that are no wall."""
    goals: int
    alive: int
    """All squares from which a box that is alone in the room can be pushed to a goal; the others are dead squares."""
    pushes_to_goal: dict[int, int]
    """For each of them the fewest pushes to the nearest goal."""

    @property
    def steps(self) -> dict[int, Move]:
        """The four steps and their moves."""
        return {-1: "L", -self.width: "U", 1: "R", self.width: "D"}

    def bit(self, square: Square) -> int:
        """The number of a square's bit."""
        return (square[0] + 1) * self.width + square[1] + 1

    def square(self, bit: int) -> Square:
        """The square of a bit."""
        return bit // self.width - 1, bit % self.width - 1

    def mask(self, squares: Iterable[Square]) -> int:
        """The set of these squares."""
        return sum(1 << self.bit(square) for square in squares)

    def reach(self, player: int, *, boxes: int) -> int:
        """Where the player can walk without a push."""
        return functools.reduce(int.__or__, self.walks(player, boxes=boxes))

    def walks(self, player: int, *, boxes: int) -> Iterator[int]:
        """The squares that the player reaches in 0, 1, 2, ... moves without a push, as far as there are any."""
        open_squares = self.free & ~boxes
        reached = newest = 1 << player
        while newest:
            yield newest
            grown = newest << 1 | newest >> 1 | newest << self.width | newest >> self.width
            newest = grown & open_squares & ~reached
            reached |= newest

    def walk_lengths(self, player: int, *, boxes: int) -> dict[int, int]:
        """For each square that the player can walk to, the moves that it takes."""
        return {
            square: length for length, mask in enumerate(self.walks(player, boxes=boxes)) for square in bits_of(mask)
        }

    def frozen(self, boxes: int) -> int:
        """The boxes that can never be moved again, or never without loss: the largest set that holds itself.

        A box is held on an axis by a wall or a box of the set on either side of it, or by dead squares on both.
        """
        held = boxes
        while True:
            solid = ~self.free | held
            left = held
            for step in (1, self.width):
                left &= solid << step | solid >> step | ~self.alive << step & ~self.alive >> step
            if left == held:
                return held
            held = left


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


@functools.lru_cache(maxsize=256)
def grid_of(room: Room) -> Grid:
    """The room's bits."""
    width = room.width + 2
    # Only `bit` and `mask` are asked of it.
    frame = Grid(width=width, free=0, goals=0, alive=0, pushes_to_goal={})
    squares = [(row, column) for row in range(room.height) for column in range(room.width)]
    free = frame.mask(square for square in squares if square not in room.walls)
    goals = frame.mask(room.goals)
    distances = _pushes_to_goal(free=free, goals=goals, steps=tuple(frame.steps))
    return Grid(
        width=width,
        free=free,
        goals=goals,
        alive=sum(1 << square for square in distances),
        pushes_to_goal=distances,
    )


def _pushes_to_goal(*, free: int, goals: int, steps: tuple[int, ...]) -> dict[int, int]:
    """Pull a lone box away from the goals: it goes one step, and the player needs one more square to step back to."""
    distances = dict.fromkeys(bits_of(goals), 0)
    waiting = deque(distances)
    while waiting:
        box = waiting.popleft()
        for step in steps:
            pulled = box + step
            if free >> pulled & 1 and free >> (pulled + step) & 1 and pulled not in distances:
                distances[pulled] = distances[box] + 1
                waiting.append(pulled)
    return distances


def is_deadlocked(state: State) -> bool:
    """Whether a box on no goal stands on a dead square, or is frozen: then no moves solve the level.

    Other deadlocks there are, which only a search finds.
    """
    grid = grid_of(state.room)
    boxes = grid.mask(state.boxes)
    return bool((boxes & ~grid.alive) | (grid.frozen(boxes) & ~grid.goals))
