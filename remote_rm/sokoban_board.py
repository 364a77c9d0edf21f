"""A Sokoban board: its state, its reachable squares, and a solver."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

Move = Literal["L", "U", "R", "D"]
MOVES: tuple[Move, ...] = get_args(Move)
MOVE_NAMES: dict[Move, str] = {"L": "Left", "U": "Up", "R": "Right", "D": "Down"}
Square = tuple[int, int]
"""Row and column, from 0 at the top left."""
_STEPS: dict[Move, Square] = {"L": (0, -1), "U": (-1, 0), "R": (0, 1), "D": (1, 0)}


def neighbour(square: Square, move: Move) -> Square:
    """The square next to `square` in the direction of `move`."""
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
        """Whether the square is a wall; everything outside of the room is."""
        row, column = square
        return not (0 <= row < self.height and 0 <= column < self.width) or square in self.walls


@dataclass(frozen=True, kw_only=True)
class State:
    """A room with its boxes and the player; made by `sokoban_levels.read_state`, which checks that it is a level."""

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
        """Whether there is a box on the square to which the move leads."""
        return neighbour(self.player, move) in self.boxes

    def obstacle(self, move: Move) -> str | None:
        """Why the move is invalid, in words; None if it is valid."""
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
        """The state after a move, or None if the move is invalid."""
        if self.obstacle(move) is not None:
            return None
        target = neighbour(self.player, move)
        if target not in self.boxes:
            return replace(self, player=target)
        return replace(self, player=target, boxes=self.boxes - {target} | {neighbour(target, move)})


@dataclass(frozen=True, kw_only=True)
class Played:
    """The result of a list of moves; moves after the level is solved are ignored."""

    state: State
    valid: int
    """How many moves were made."""
    pushes: int
    """How many of them pushed a box."""
    invalid: tuple[tuple[int, Move, str], ...]
    """Each move that could not be made: its number in the list, from 1, the move, and the obstacle in words."""


def play(state: State, moves: Iterable[Move]) -> Played:
    """Make the moves in order; an invalid move changes nothing, and the later ones are still made."""
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


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Square (row, column) is bit `(row + 1) * width + column + 1`: there is a wall around, so that no shift wraps.

    Sets of squares are masks, single squares are numbers of bits, and a step is the difference of two of them.
    """

    width: int
    free: int
    """All squares that are not walls."""
    goals: int
    alive: int
    """All squares from which the only box of the room could be pushed to a goal; the others are dead squares."""
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
        width=width, free=free, goals=goals, alive=sum(1 << square for square in distances), pushes_to_goal=distances
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
    """Whether a box that is not on a goal is on a dead square or frozen: then no moves solve the level.

    Other deadlocks there are, which only a search finds.
    """
    grid = grid_of(state.room)
    boxes = grid.mask(state.boxes)
    return bool((boxes & ~grid.alive) | (grid.frozen(boxes) & ~grid.goals))


Measure = Literal["pushes", "moves"]
Verdict = Literal["solved", "unsolvable", "gave_up"]
_Node = tuple[int, int]
"""The boxes and the player's square; if pushes are counted, the first of all squares that the player can walk to."""
_Push = tuple[int, int]
"""The box before the push, and the step it makes."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search has found."""

    verdict: Verdict
    expanded: int
    """How many states were looked at."""
    moves: tuple[Move, ...] = ()
    """A shortest solution, if the verdict is `solved`."""
    pushes: int = 0
    """How many of the moves push a box."""


def solve(state: State, *, fewest: Measure, max_states: int) -> Search:
    """Search for a solution of the fewest pushes, or of the fewest moves, by A* (Hart, Nilsson and Raphael, 1968).

    A state whose boxes are lost on a dead square or frozen is skipped. The estimate of the remaining pushes is the sum of
    the pushes that each box would need to its nearest goal if it were the only one.

    Args:
        max_states: the most states to expand before it gives up.
    """
    if is_deadlocked(state):
        return Search(verdict="unsolvable", expanded=0)
    return _AStar(grid_of(state.room), counts_moves=fewest == "moves").search(state, max_states=max_states)


class _AStar:
    def __init__(self, grid: Grid, *, counts_moves: bool) -> None:
        self.grid = grid
        self.counts_moves = counts_moves
        self.came: dict[_Node, tuple[_Node, _Push]] = {}

    def search(self, state: State, *, max_states: int) -> Search:
        grid = self.grid
        player = grid.bit(state.player)
        start = self.node(grid.mask(state.boxes), player)
        costs: dict[_Node, int] = {start: 0}
        order = itertools.count()
        frontier = [(self.estimate(start[0]), next(order), start)]
        closed: set[_Node] = set()
        while frontier:
            _, _, node = heapq.heappop(frontier)
            if node in closed:
                continue
            if node[0] == grid.goals:
                moves = tuple(self.moves_to(node, start=start, player=player))
                return Search(
                    verdict="solved", expanded=len(closed), moves=moves, pushes=len(self.pushes_to(node, start=start))
                )
            if len(closed) == max_states:
                return Search(verdict="gave_up", expanded=len(closed))
            closed.add(node)
            for following, push, added in self.expand(node):
                cost = costs[node] + added
                if following not in closed and cost < costs.get(following, cost + 1):
                    costs[following] = cost
                    self.came[following] = (node, push)
                    heapq.heappush(frontier, (cost + self.estimate(following[0]), next(order), following))
        return Search(verdict="unsolvable", expanded=len(closed))

    def node(self, boxes: int, player: int) -> _Node:
        if self.counts_moves:
            return boxes, player
        return boxes, next(bits_of(self.grid.reach(player, boxes=boxes)))

    def estimate(self, boxes: int) -> int:
        return sum(self.grid.pushes_to_goal[box] for box in bits_of(boxes))

    def expand(self, node: _Node) -> Iterator[tuple[_Node, _Push, int]]:
        """The states one push further, with that push and its cost."""
        grid, (boxes, player) = self.grid, node
        walked = grid.walk_lengths(player, boxes=boxes)
        room_for_box = grid.alive & ~boxes
        for box in bits_of(boxes):
            for step in grid.steps:
                target = box + step
                if box - step not in walked or not room_for_box >> target & 1:
                    continue
                pushed = boxes ^ 1 << box ^ 1 << target
                if grid.frozen(pushed) & ~grid.goals:
                    continue
                yield self.node(pushed, box), (box, step), walked[box - step] + 1 if self.counts_moves else 1

    def pushes_to(self, node: _Node, *, start: _Node) -> list[_Push]:
        """The pushes that lead to a state."""
        pushes = []
        while node != start:
            node, push = self.came[node]
            pushes.append(push)
        return pushes[::-1]

    def moves_to(self, node: _Node, *, start: _Node, player: int) -> Iterator[Move]:
        """The moves that lead to a state: before each push the shortest walk to it."""
        boxes = start[0]
        for box, step in self.pushes_to(node, start=start):
            yield from self.walk(player, box - step, boxes=boxes)
            yield self.grid.steps[step]
            boxes ^= 1 << box ^ 1 << box + step
            player = box

    def walk(self, player: int, target: int, *, boxes: int) -> list[Move]:
        lengths = self.grid.walk_lengths(player, boxes=boxes)
        moves: list[Move] = []
        while target != player:
            step, move = next(
                (step, move)
                for step, move in self.grid.steps.items()
                if lengths.get(target - step, -1) == lengths[target] - 1
            )
            moves.append(move)
            target -= step
        return moves[::-1]
