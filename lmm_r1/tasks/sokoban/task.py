"""The task `sokoban`: rows that carry a level as their state, and no label; an environment plays what is answered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lmm_r1.tasks.sokoban.generator import Level, LevelMaker, room_name
from lmm_r1.tasks.sokoban.notation import board_text
from lmm_r1.tasks.sokoban.picture import LEGEND, SMALLEST_TILE_PX, draw_board
from lmm_r1.tasks.sokoban.state import MOVE_NAMES, Room
from lmm_r1.tasks.task import Modality, Split, TaskRow, check_image_share, kind_of_row, split_of

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
    """A level's best solution takes at least so many pushes, and at most `max_pushes`."""
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

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from a random stream of its own; raises UserError where no level meets the bounds."""

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

    def _prompt(self, level: Level, kind: Literal["text", "image"]) -> str | list[dict[str, Any]]:
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
