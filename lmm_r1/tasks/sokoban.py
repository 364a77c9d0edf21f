"""The task `sokoban`: each row has a level as its state and no label; an environment plays the response."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image, ImageDraw

from lmm_r1.errors import UserError
from lmm_r1.tasks import Modality, Parts, Split, TaskRow, check_image_share, kind_of_row, split_of
from remote_rm.sokoban_board import (
    MOVE_NAMES,
    MOVES,
    Grid,
    Move,
    Room,
    Square,
    State,
    bits_of,
    grid_of,
    neighbour,
    solve,
)
from remote_rm.sokoban_levels import LARGEST_SIDE, board_text, symbol_at

ROOMS_TRIED = 2000
"""The most random rooms that are tried for one level."""
MOST_STATES = 50_000
"""A room that needs more states, in the generator or the solver, is replaced by another one."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level with its shortest solution."""

    state: State
    fewest_pushes: int
    solution: tuple[Move, ...]
    """Of the fewest moves; it may push more often than `fewest_pushes`."""


@dataclass(frozen=True, kw_only=True)
class LevelMaker:
    """What the levels are like.

    Raises ValueError for bounds that no level meets.
    """

    height: int
    """Rows of the board, the outer walls included."""
    width: int
    boxes: int
    min_pushes: int
    """The fewest pushes that a level's best solution may take, and the most."""
    max_pushes: int
    wall_share: float
    """How much of the inside is wall, 0 up to 1."""

    def __post_init__(self) -> None:
        if not (3 <= self.height <= LARGEST_SIDE and 3 <= self.width <= LARGEST_SIDE):
            raise ValueError(
                f"a board of {self.height} rows and {self.width} columns: with the outer walls 3 to {LARGEST_SIDE} are needed"
            )
        if self.boxes < 1:
            raise ValueError(f"{self.boxes} boxes: a level has at least one")
        if not 1 <= self.min_pushes <= self.max_pushes:
            raise ValueError(
                f"{self.min_pushes} to {self.max_pushes} pushes: at least one is needed, and the most must not be below the "
                "fewest"
            )
        if not 0 <= self.wall_share < 1:
            raise ValueError(f"wall_share {self.wall_share} must be from 0 up to, and below, 1")
        inside = (self.height - 2) * (self.width - 2)
        if inside - self._inner_walls < self.boxes + 2:
            raise ValueError(
                f"{self.boxes} boxes need {self.boxes + 2} free squares, and of the {inside} inside the board's walls "
                f"{self._inner_walls} are wall"
            )

    @property
    def _inner_walls(self) -> int:
        return round((self.height - 2) * (self.width - 2) * self.wall_share)

    def make(self, rng: random.Random, *, accepts: Callable[[Room], bool] = lambda room: True) -> Level:
        """Return a random level within the bounds, in a room that is accepted.

        Raises:
            UserError: many rooms held none.
        """
        for _ in range(ROOMS_TRIED):
            room = self._room(rng)
            level = self._level_in(room, rng) if room is not None and accepts(room) else None
            if level is not None:
                return level
        raise UserError(
            f"no level of {self.min_pushes} to {self.max_pushes} pushes with {self.boxes} boxes on {self.height} x "
            f"{self.width} squares was found in {ROOMS_TRIED} random rooms; ask for fewer pushes, fewer walls or a larger "
            "board"
        )

    def _room(self, rng: random.Random) -> Room | None:
        """A random room whose floor is connected; None if too little of it is."""
        inside = [(row, column) for row in range(1, self.height - 1) for column in range(1, self.width - 1)]
        floor = _largest_part(set(inside) - set(rng.sample(inside, self._inner_walls)))
        if len(floor) < self.boxes + 2:
            return None
        squares = {(row, column) for row in range(self.height) for column in range(self.width)}
        goals = rng.sample(sorted(floor), self.boxes)
        return Room(height=self.height, width=self.width, walls=frozenset(squares - floor), goals=frozenset(goals))

    def _level_in(self, room: Room, rng: random.Random) -> Level | None:
        grid = grid_of(room)
        distances = pushes_to_solve(grid, max_pushes=self.max_pushes, max_states=MOST_STATES)
        within = sorted({pushes for pushes in distances.values() if pushes >= self.min_pushes})
        if not within:
            return None
        # Most states are a few pushes away: a distance is drawn first, so that the hard ones are not rare.
        chosen = rng.choice(within)
        boxes, first = rng.choice([node for node, pushes in distances.items() if pushes == chosen])
        player = rng.choice(list(bits_of(grid.reach(first, boxes=boxes))))
        state = State(room=room, boxes=frozenset(map(grid.square, bits_of(boxes))), player=grid.square(player))
        found = solve(state, fewest="moves", max_states=MOST_STATES)
        if found.verdict != "solved":
            return None
        return Level(state=state, fewest_pushes=chosen, solution=found.moves)


def pushes_to_solve(grid: Grid, *, max_pushes: int, max_states: int) -> dict[tuple[int, int], int]:
    """Return the fewest pushes to the solution from each state that has one, nearest first.

    Pulls lead backwards from the solved states, so a breadth-first search gives the exact distance of each it reaches.

    Returns:
        By the boxes and the first square that the player can walk to; up to `max_pushes`, and about `max_states` of them.
    """
    distances: dict[tuple[int, int], int] = {}
    outside = grid.free & ~grid.goals
    while outside:
        first = next(bits_of(outside))
        outside &= ~grid.reach(first, boxes=grid.goals)
        distances[grid.goals, first] = 0
    newest = list(distances)
    for pushes in range(1, max_pushes + 1):
        found = dict.fromkeys(node for pulled in newest for node in _pulled(grid, *pulled) if node not in distances)
        if not found or len(distances) + len(found) > max_states:
            break
        distances |= dict.fromkeys(found, pushes)
        newest = list(found)
    return distances


def _pulled(grid: Grid, boxes: int, player: int) -> list[tuple[int, int]]:
    """The states from which one push leads here."""
    reach = grid.reach(player, boxes=boxes)
    open_squares = grid.free & ~boxes
    found = []
    for box in bits_of(boxes):
        for step in grid.steps:
            beside = box + step
            if reach >> beside & 1 and open_squares >> (beside + step) & 1:
                pulled = boxes ^ 1 << box ^ 1 << beside
                found.append((pulled, next(bits_of(grid.reach(beside + step, boxes=pulled)))))
    return found


def _largest_part(floor: set[Square]) -> set[Square]:
    """The largest connected part; of equal ones that which begins first."""
    largest: set[Square] = set()
    left = set(floor)
    for start in sorted(floor):
        if start not in left:
            continue
        part, waiting = {start}, [start]
        while waiting:
            square = waiting.pop()
            beside = {neighbour(square, move) for move in MOVES} & left - part
            part |= beside
            waiting += beside
        left -= part
        largest = max(largest, part, key=len)
    return largest


def room_name(room: Room) -> str:
    """A name that a room shares with its mirror images and rotations: the first of their texts."""
    lines = board_text(State(room=room, boxes=frozenset(), player=(-1, -1))).split("\n")
    texts = []
    for _ in range(4):
        lines = ["".join(column) for column in zip(*lines[::-1], strict=True)]
        texts += ["\n".join(lines), "\n".join(line[::-1] for line in lines)]
    return min(texts)


SMALLEST_TILE_PX = 8
WALL = (70, 74, 84)
FLOOR = (232, 230, 222)
GRID = (206, 204, 196)
GOAL = (214, 40, 57)
BOX = (224, 148, 40)
BOX_ON_GOAL = (46, 150, 70)
PLAYER = (36, 92, 200)
LEGEND = (
    "dark squares are walls, red dots are goals, orange squares are boxes, green squares are boxes on goals, and the "
    "blue disc is you, with a red ring on a goal"
)


def draw_board(state: State, *, tile_px: int) -> Image.Image:
    """The board in RGB, `tile_px` square pixels for each square.

    Raises ValueError for tiles that are too small to be recognised.
    """
    if tile_px < SMALLEST_TILE_PX:
        raise ValueError(f"tiles of {tile_px} px: at least {SMALLEST_TILE_PX} are needed")
    board = Image.new("RGB", (state.room.width * tile_px, state.room.height * tile_px), FLOOR)
    brush = ImageDraw.Draw(board)
    for row in range(state.room.height):
        for column in range(state.room.width):
            _draw_square(
                brush, symbol_at(state, (row, column)), left=column * tile_px, top=row * tile_px, size=tile_px
            )
    return board


def _draw_square(brush: ImageDraw.ImageDraw, symbol: str, *, left: int, top: int, size: int) -> None:
    def inset(share: float) -> tuple[int, int, int, int]:
        margin = round(size * share)
        return left + margin, top + margin, left + size - 1 - margin, top + size - 1 - margin

    if symbol == "#":
        brush.rectangle(inset(0), fill=WALL)
        return
    brush.rectangle(inset(0), fill=FLOOR, outline=GRID)
    if symbol == ".":
        brush.ellipse(inset(0.32), fill=GOAL)
    elif symbol in "$*":
        brush.rectangle(inset(0.14), fill=BOX if symbol == "$" else BOX_ON_GOAL)
    elif symbol in "@+":
        if symbol == "+":
            brush.ellipse(inset(0.02), fill=GOAL)
        brush.ellipse(inset(0.16), fill=PLAYER)


_TEXT_PROMPT = (
    "This is a level of Sokoban: # wall, - floor, . goal, $ box, * box on a goal, @ you, + you on a goal.\n{board}\n"
)
_IMAGE_PROMPT = f"This is a level of Sokoban: {LEGEND}.\n"
_QUESTION = (
    "You push boxes by walking into them, one at a time. Push every box onto a goal. Write the moves as "
    "<answer>Left, Up, Right, Down</answer>."
)


@dataclass(frozen=True, kw_only=True)
class SokobanTask:
    """Levels that are solvable and not solved. Train and test share no room, not even mirrored or turned.

    Each row has the columns `state` (XSB text), `optimal_pushes` and `optimal_moves`.
    """

    height: int = 6
    """Rows of the board, the outer walls included."""
    width: int = 6
    boxes: int = 1
    min_pushes: int = 1
    """The fewest pushes of a level's best solution; the most are `max_pushes`."""
    max_pushes: int = 8
    wall_share: float = 0.15
    """How much of the inside is wall."""
    tile_px: int = 28
    """Pixels on a square's side; 28 is one visual token of a ViT with patches of 14 pixels merged 2x2."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have a picture, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        check_image_share(self.image_share)
        if self.tile_px < SMALLEST_TILE_PX:
            raise ValueError(f"tiles of {self.tile_px} px: at least {SMALLEST_TILE_PX} are needed")
        self.level_maker()

    def level_maker(self) -> LevelMaker:
        """What makes its levels; raises ValueError for bounds that no level meets."""
        return LevelMaker(
            height=self.height,
            width=self.width,
            boxes=self.boxes,
            min_pushes=self.min_pushes,
            max_pushes=self.max_pushes,
            wall_share=self.wall_share,
        )

    def at_difficulty(self, level: int) -> SokobanTask:
        """The task with as many pushes as the level or one more."""
        return replace(self, min_pushes=level, max_pushes=level + 1)

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream; raises UserError if no level meets the bounds."""

        def belongs(room: Room) -> bool:
            return split_of(f"sokoban {room_name(room)}") == split

        maker = self.level_maker()
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            rng = random.Random(f"sokoban {split} {kind} {seed} {index}")
            level = maker.make(rng, accepts=belongs)
            yield TaskRow(
                messages=[{"role": "user", "content": self._prompt(level, kind)}],
                answer="",
                datasource=f"sokoban_{kind}",
                solution=solution_of(level),
                columns={
                    "state": board_text(level.state),
                    "optimal_pushes": level.fewest_pushes,
                    "optimal_moves": len(level.solution),
                },
            )

    def _prompt(self, level: Level, kind: Literal["text", "image"]) -> str | Parts:
        if kind == "text":
            return _TEXT_PROMPT.format(board=board_text(level.state, floor="-")) + _QUESTION
        board = draw_board(level.state, tile_px=self.tile_px)
        return [{"type": "image", "image": board}, {"type": "text", "text": _IMAGE_PROMPT + _QUESTION}]


def solution_of(level: Level) -> str:
    """`<think>I stand at (2, 2). A box at (2, 3) ...</think><answer>Right, Down</answer>`: squares counted from 1."""
    state = level.state

    def listed(squares: frozenset[tuple[int, int]]) -> str:
        return ", ".join(f"({row + 1}, {column + 1})" for row, column in sorted(squares))

    return (
        f"<think>Player {listed(frozenset([state.player]))}. Boxes {listed(state.boxes)}. Goals {listed(state.room.goals)}."
        f"</think><answer>{', '.join(MOVE_NAMES[move] for move in level.solution)}</answer>"
    )


TASK = SokobanTask()
