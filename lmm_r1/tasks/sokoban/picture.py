"""A board as a picture: flat colours and one shape for each thing, still told apart at 8 pixels a square."""

from __future__ import annotations

from PIL import Image, ImageDraw

from lmm_r1.tasks.sokoban.notation import symbol_at
from lmm_r1.tasks.sokoban.state import State

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

    Raises ValueError for tiles too small to tell what is on them.
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
