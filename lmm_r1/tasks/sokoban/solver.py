"""The shortest solution of a level, in pushes or in moves, or the proof that there is none."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmm_r1.tasks.sokoban.grid import Grid, bits_of, grid_of, is_deadlocked
from lmm_r1.tasks.sokoban.state import Move, State

Measure = Literal["pushes", "moves"]
Verdict = Literal["solved", "unsolvable", "gave_up"]
_Node = tuple[int, int]
"""The boxes and the player's square; where pushes are counted, the first square of all that the player can walk to."""
_Push = tuple[int, int]
"""The box before the push, and the step it makes."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search has found."""

    verdict: Verdict
    expanded: int
    """How many states were looked at."""
    moves: tuple[Move, ...] = ()
    """A shortest solution, where the verdict is `solved`."""
    pushes: int = 0
    """How many of the moves push a box."""


def solve(state: State, *, fewest: Measure, max_states: int) -> Search:
    """Search for a solution of the fewest pushes, or of the fewest moves, by A* (Hart, Nilsson and Raphael, 1968).

    A state whose boxes are lost on a dead square or frozen is not looked at. The estimate of what is left is the sum of
    the pushes that each box, alone, needs to its nearest goal.

    Args:
        max_states: after so many expanded states it gives up.
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
