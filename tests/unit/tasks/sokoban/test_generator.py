import random

import pytest
from helpers.episodes import CORNER, level, shortest
from helpers.tables import table

from lmm_r1.errors import UserError
from lmm_r1.tasks.sokoban import LevelMaker, pushes_to_solve, room_name
from remote_rm.sokoban_board import grid_of, play, solve
from remote_rm.sokoban_levels import board_text


def maker(**changed):
    settings = {"height": 6, "width": 6, "boxes": 1, "min_pushes": 1, "max_pushes": 8, "wall_share": 0.15}
    return LevelMaker(**settings | changed)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"boxes": 2, "min_pushes": 4, "max_pushes": 10},
        {"height": 5, "width": 8, "boxes": 2, "wall_share": 0.0},
        {"height": 7, "width": 7, "min_pushes": 5, "max_pushes": 5, "wall_share": 0.2},
    ],
)
def test_levels_are_unsolved_and_solvable_with_the_stated_optimum(settings):
    made = maker(**settings)
    for seed in range(6):
        found = made.make(random.Random(seed))
        state = found.state
        assert not state.is_solved
        assert len(state.boxes) == len(state.room.goals) == made.boxes
        assert (state.room.height, state.room.width) == (made.height, made.width)
        assert made.min_pushes <= found.fewest_pushes <= made.max_pushes
        assert solve(state, fewest="pushes", max_states=100_000).pushes == found.fewest_pushes
        assert shortest(state, fewest="pushes") == found.fewest_pushes
        assert shortest(state, fewest="moves") == len(found.solution)
        assert play(state, found.solution).state.is_solved


def test_the_outer_squares_are_walls():
    state = maker(height=4, width=7).make(random.Random(0)).state
    lines = board_text(state).split("\n")
    assert (lines[0], lines[-1]) == ("#######", "#######")
    assert all(line[0] == line[-1] == "#" for line in lines)


def test_a_seed_gives_one_level_and_seeds_give_many():
    levels = [maker().make(random.Random(seed)) for seed in range(20)]
    assert levels == [maker().make(random.Random(seed)) for seed in range(20)]
    assert len({board_text(found.state) for found in levels}) == 20


def test_pulling_backwards_gives_the_pushes_of_every_state():
    # One box, so its square tells the distance, except that it may also be asked from where it can't be pushed on.
    grid = grid_of(level(CORNER).room)
    distances = pushes_to_solve(grid, max_pushes=9, max_states=1000)
    by_square = {}
    for (boxes, _), pushes in distances.items():
        by_square.setdefault(grid.square(boxes.bit_length() - 1), set()).add(pushes)
    assert by_square == {(3, 1): {0}, (3, 2): {1}, (3, 3): {2}, (2, 1): {1}, (2, 2): {2}, (2, 3): {3}}
    assert max(pushes_to_solve(grid, max_pushes=2, max_states=1000).values()) == 2


def test_a_room_has_one_name_however_it_is_turned_or_mirrored():
    text = "######\n#  #.#\n#$@  #\n######"
    lines = text.split("\n")
    mirrored = "\n".join(line[::-1] for line in lines)
    turned = "\n".join("".join(column) for column in zip(*lines[::-1], strict=True))
    names = {room_name(level(shown).room) for shown in (text, mirrored, turned)}
    assert len(names) == 1
    assert room_name(level("######\n# # .#\n#$@  #\n######").room) not in names


@pytest.mark.parametrize(
    ("settings", "said"), table("tasks/sokoban/generator", "bounds_that_no_level_meets_are_refused")
)
def test_bounds_that_no_level_meets_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        maker(**settings)


def test_pushes_that_no_room_of_the_size_takes_end_with_what_to_ask_instead():
    with pytest.raises(UserError, match="no level of 40 to 50 pushes with 1 boxes on 4 x 4 squares .* larger board"):
        maker(height=4, width=4, wall_share=0.0, min_pushes=40, max_pushes=50).make(random.Random(0))
