import numpy as np
import pytest
from helpers.episodes import level

from lmm_r1.tasks.sokoban import BOX, BOX_ON_GOAL, FLOOR, GOAL, PLAYER, WALL, draw_board
from remote_rm.sokoban_levels import board_text

BOARDS = ("#######\n#@ $*.#\n#  $ .#\n#######", "######\n#+$ .#\n# $  #\n######")
MIDDLES = {WALL: "#", FLOOR: " ", GOAL: ".", BOX: "$", BOX_ON_GOAL: "*", PLAYER: "@"}


def read_board(picture, tile_px):
    """The board's text, told by the middle of each tile, and for the player by whether there is red around."""
    pixels = np.asarray(picture)
    lines = []
    for top in range(0, pixels.shape[0], tile_px):
        line = ""
        for left in range(0, pixels.shape[1], tile_px):
            tile = pixels[top : top + tile_px, left : left + tile_px]
            symbol = MIDDLES[tuple(map(int, tile[tile_px // 2, tile_px // 2]))]
            line += "+" if symbol == "@" and (tile == GOAL).all(axis=2).any() else symbol
        lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("text", BOARDS)
@pytest.mark.parametrize("tile_px", [8, 13, 28, 64])
def test_a_drawn_board_is_read_back(text, tile_px):
    state = level(text)
    picture = draw_board(state, tile_px=tile_px)
    assert (picture.mode, picture.size) == ("RGB", (state.room.width * tile_px, state.room.height * tile_px))
    assert read_board(picture, tile_px) == board_text(state) == text


def test_things_differ_in_their_mean_colour_too():
    pixels = np.asarray(draw_board(level(BOARDS[0]), tile_px=28)).reshape(4, 28, 7, 28, 3).mean(axis=(1, 3))
    # Wall, player, floor, box, box on goal, goal; on the second board the player on a goal.
    shown = [pixels[0, 0], pixels[1, 1], pixels[1, 2], pixels[1, 3], pixels[1, 4], pixels[1, 5]]
    other = np.asarray(draw_board(level(BOARDS[1]), tile_px=28)).reshape(4, 28, 6, 28, 3).mean(axis=(1, 3))
    shown.append(other[1, 1])
    gaps = [np.abs(a - b).max() for place, a in enumerate(shown) for b in shown[:place]]
    assert min(gaps) > 15


def test_tiles_too_small_to_tell_apart_are_refused():
    with pytest.raises(ValueError, match="tiles of 7 px: at least 8"):
        draw_board(level(BOARDS[0]), tile_px=7)
