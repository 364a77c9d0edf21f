"""The task `sokoban`: each row has a level as its state and no label; an environment plays the response."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lmm_r1.agents.sokoban import SMALLEST_TILE_PX, draw_board
from lmm_r1.errors import UserError
from lmm_r1.tools.tasks import Modality, Parts, Split, TaskRow, check_image_share, kind_of_row, split_of
from remote_rm.sokoban import LARGEST_SIDE, Level, Move, level_text, play, solve

ROOMS_TRIED = 5000
"""The most random levels that are tried for one row."""
MOST_STATES = 50_000
"""A level that needs more states in the solver is replaced by another one."""
_TEXT_PROMPT = (
    "This is a level of Sokoban: # wall, - floor, . goal, $ box, * box on a goal, @ you, + you on a goal.\n{board}\n"
)
_IMAGE_PROMPT = (
    "This is a level of Sokoban: dark squares are walls, red dots are goals, orange squares are boxes, green squares are "
    "boxes on goals, and the blue disc is you, with a red ring on a goal.\n"
)
_QUESTION = (
    "You push boxes by walking into them, one at a time. Push every box onto a goal. Write the moves as "
    "<answer>Left, Up, Right, Down</answer>."
)


@dataclass(frozen=True, kw_only=True)
class SokobanTask:
    """Levels that are solvable and not solved. Train and test share no room, not even mirrored or turned.

    Each row has the columns `state` (XSB text) and `optimal_moves`.
    """

    height: int = 6
    """Rows of the board, the outer walls included."""
    width: int = 6
    boxes: int = 1
    min_pushes: int = 1
    """The fewest pushes of a level's shortest solution; the most are `max_pushes`."""
    max_pushes: int = 8
    wall_share: float = 0.15
    """How much of the inside is wall."""
    tile_px: int = 28
    """Pixels on a square's side; 28 is one visual token of a ViT with patches of 14 pixels merged 2x2."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have a picture, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        """Raise ValueError for bounds that no level meets."""
        check_image_share(self.image_share)
        inside = (self.height - 2) * (self.width - 2)
        sides = f"a board of {self.height} rows and {self.width} columns"
        for is_wrong, said in (
            (self.tile_px < SMALLEST_TILE_PX, f"tiles of {self.tile_px} px: at least {SMALLEST_TILE_PX} are needed"),
            (
                min(self.height, self.width) < 3 or max(self.height, self.width) > LARGEST_SIDE,
                f"{sides}: with the outer walls 3 to {LARGEST_SIDE} are needed",
            ),
            (self.boxes < 1, f"{self.boxes} boxes: a level has at least one"),
            (
                not 1 <= self.min_pushes <= self.max_pushes,
                f"{self.min_pushes} to {self.max_pushes} pushes: the first must be 1 or more, and the second not below it",
            ),
            (not 0 <= self.wall_share < 1, f"wall_share {self.wall_share} must be from 0 up to, and below, 1"),
            (
                inside - self._inner_walls <= 2 * self.boxes,
                f"{self.boxes} boxes on {inside} squares inside the walls, of which {self._inner_walls} are wall: too many",
            ),
        ):
            if is_wrong:
                raise ValueError(said)

    @property
    def _inner_walls(self) -> int:
        return round((self.height - 2) * (self.width - 2) * self.wall_share)

    def make(self, rng: random.Random, *, split: Split) -> tuple[Level, tuple[Move, ...]]:
        """Return a random level within the bounds, with a shortest solution; raises UserError if none was found."""
        inside = [(row, column) for row in range(1, self.height - 1) for column in range(1, self.width - 1)]
        for _ in range(ROOMS_TRIED):
            free = rng.sample(inside, len(inside) - self._inner_walls)
            level = Level(
                height=self.height,
                width=self.width,
                free=frozenset(free),
                goals=frozenset(free[: self.boxes]),
                boxes=frozenset(free[self.boxes : 2 * self.boxes]),
                player=free[-1],
            )
            if split_of(f"sokoban {room_name(level)}") != split:
                continue
            solution = solve(level, max_states=MOST_STATES)
            if solution is not None and self.min_pushes <= play(level, solution).pushes <= self.max_pushes:
                return level, solution
        raise UserError(
            f"no level of {self.min_pushes} to {self.max_pushes} pushes with {self.boxes} boxes on {self.height} x "
            f"{self.width} squares was found in {ROOMS_TRIED} random ones; ask for fewer pushes, fewer walls or a larger "
            "board"
        )

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream; raises UserError if no level meets the bounds."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            level, solution = self.make(random.Random(f"sokoban {split} {kind} {seed} {index}"), split=split)
            content: str | Parts = _TEXT_PROMPT.format(board=level_text(level, floor="-")) + _QUESTION
            if kind == "image":
                board = draw_board(level, tile_px=self.tile_px)
                content = [{"type": "image", "image": board}, {"type": "text", "text": _IMAGE_PROMPT + _QUESTION}]
            yield TaskRow(
                messages=[{"role": "user", "content": content}],
                answer="",
                datasource=f"sokoban_{kind}",
                solution=f"<think>{_squares(level)}</think><answer>{', '.join(solution)}</answer>",
                columns={"state": level_text(level), "optimal_moves": len(solution)},
            )


def room_name(level: Level) -> str:
    """A name that a level's room, its walls and goals, shares with its mirror images and rotations."""
    lines, texts = level_text(replace(level, boxes=frozenset(), player=(-1, -1))).split("\n"), []
    for _ in range(4):
        lines = ["".join(column) for column in zip(*lines[::-1], strict=True)]
        texts += ["\n".join(lines), "\n".join(line[::-1] for line in lines)]
    return min(texts)


def _squares(level: Level) -> str:
    """`Player (2, 2). Boxes (2, 3). Goals (2, 4).`, counted from 1."""
    named = {"Player": [level.player], "Boxes": sorted(level.boxes), "Goals": sorted(level.goals)}
    return " ".join(
        f"{name} {', '.join(f'({row + 1}, {column + 1})' for row, column in squares)}."
        for name, squares in named.items()
    )


TASK = SokobanTask()
