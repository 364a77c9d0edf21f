"""The rules of Sokoban: a room, a state of it, and what a move makes of a state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

Move = Literal["L", "U", "R", "D"]
MOVES: tuple[Move, ...] = get_args(Move)
MOVE_NAMES: dict[Move, str] = {"L": "Left", "U": "Up", "R": "Right", "D": "Down"}
Square = tuple[int, int]
"""Row and column, from 0 at the top left."""
_STEPS: dict[Move, Square] = {"L": (0, -1), "U": (-1, 0), "R": (0, 1), "D": (1, 0)}


def neighbour(square: Square, move: Move) -> Square:
    """The square beside `square` in the direction of `move`."""
    down, right = _STEPS[move]
    return square[0] + down, square[1] + right


@dataclass(frozen=True, kw_only=True)
class Room:
    """What no move changes."""

    height: int
    width: int
    walls: frozenset[Square]
    goals: frozenset[Square]

    def is_wall(self, square: Square) -> bool:
        """Whether nothing can stand there; everything outside of the room is wall."""
        row, column = square
        return not (0 <= row < self.height and 0 <= column < self.width) or square in self.walls


@dataclass(frozen=True, kw_only=True)
class State:
    """A room with its boxes and the player; made by `notation.read_state`, which checks that it is a level."""

    room: Room
    boxes: frozenset[Square]
    player: Square

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a goal."""
        return self.boxes <= self.room.goals

    @property
    def boxes_on_goals(self) -> int:
        """How many boxes are on goals."""
        return len(self.boxes & self.room.goals)

    def is_push(self, move: Move) -> bool:
        """Whether a box stands where the move leads."""
        return neighbour(self.player, move) in self.boxes

    def obstacle(self, move: Move) -> str | None:
        """What makes the move invalid, in words; None where it is valid."""
        target = neighbour(self.player, move)
        if self.room.is_wall(target):
            return "there is a wall"
        if target not in self.boxes:
            return None
        behind = neighbour(target, move)
        if self.room.is_wall(behind):
            return "the box there stands before a wall"
        return "the box there stands before another box" if behind in self.boxes else None

    def after(self, move: Move) -> State | None:
        """The state behind a move, or None where the move is invalid."""
        if self.obstacle(move) is not None:
            return None
        target = neighbour(self.player, move)
        if target not in self.boxes:
            return replace(self, player=target)
        return replace(self, player=target, boxes=self.boxes - {target} | {neighbour(target, move)})


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of a list of moves; nothing is played once the level is solved."""

    state: State
    valid: int
    """How many moves were made."""
    pushes: int
    """How many of them pushed a box."""
    invalid: tuple[tuple[int, Move, str], ...]
    """Each move that could not be made: its number in the list, from 1, the move, and the obstacle in words."""


def play(state: State, moves: Iterable[Move]) -> Played:
    """Make the moves one after another; an invalid one changes nothing, and those behind it are made all the same."""
    valid = pushes = 0
    invalid: list[tuple[int, Move, str]] = []
    for number, move in enumerate(moves, start=1):
        if state.is_solved:
            break
        obstacle = state.obstacle(move)
        if obstacle is not None:
            invalid.append((number, move, obstacle))
            continue
        pushes += state.is_push(move)
        following = state.after(move)
        assert following is not None, "a move without an obstacle is valid"
        state = following
        valid += 1
    return Played(state=state, valid=valid, pushes=pushes, invalid=tuple(invalid))
