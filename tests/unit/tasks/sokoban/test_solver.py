import pytest
from helpers.episodes import CORNER, FROZEN, IN_A_CORNER, ONE_PUSH, WRONG_SIDE, level, shortest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.sokoban_board import grid_of, is_deadlocked, play, solve
from remote_rm.sokoban_levels import LevelError, read_state

MEASURES = ("pushes", "moves")
TWO_BOXES = "#######\n#     #\n# $@$ #\n# . . #\n#     #\n#######"


@pytest.mark.parametrize(
    ("text", "pushes", "moves"),
    [
        (ONE_PUSH, 1, 1),
        (CORNER, 2, 4),
        # From between the boxes: U, L (above the left one), D pushes; back U, R, R (above the right one), D pushes: 7.
        (TWO_BOXES, 2, 7),
        ("####\n#@*#\n####", 0, 0),
    ],
)
def test_optima_are_those_worked_out_by_hand(text, pushes, moves):
    by_pushes = solve(level(text), fewest="pushes", max_states=1000)
    by_moves = solve(level(text), fewest="moves", max_states=1000)
    assert (by_pushes.verdict, by_pushes.pushes) == ("solved", pushes)
    assert (by_moves.verdict, len(by_moves.moves)) == ("solved", moves)


def test_the_only_best_solution_is_written_move_by_move():
    assert solve(level(CORNER), fewest="moves", max_states=1000).moves == ("L", "U", "L", "D")
    assert solve(level(ONE_PUSH), fewest="pushes", max_states=1000).moves == ("R",)


def test_dead_squares_and_pushes_to_the_goal_are_those_of_a_lone_box():
    grid = grid_of(level(CORNER).room)
    # Goal at (3, 1): rows 2 and 3, columns 1 to 3. At the upper and the right wall a box can't be brought back.
    distances = {grid.square(bit): pushes for bit, pushes in grid.pushes_to_goal.items()}
    assert distances == {(3, 1): 0, (3, 2): 1, (3, 3): 2, (2, 1): 1, (2, 2): 2, (2, 3): 3}


@pytest.mark.parametrize("fewest", MEASURES)
@pytest.mark.parametrize(("text", "expanded"), [(IN_A_CORNER, 0), (FROZEN, 0), (WRONG_SIDE, 1)])
def test_an_unsolvable_level_is_called_so(text, expanded, fewest):
    found = solve(level(text), fewest=fewest, max_states=1000)
    assert (found.verdict, found.moves, found.expanded) == ("unsolvable", (), expanded)


def test_deadlocks_are_boxes_on_dead_squares_and_boxes_that_hold_each_other():
    assert is_deadlocked(level(IN_A_CORNER))
    assert is_deadlocked(level(FROZEN))
    # The same two boxes where both are on goals, and where one can still be pushed along the wall.
    assert not is_deadlocked(level("######\n# ** #\n#  @ #\n######"))
    assert not is_deadlocked(level("#######\n#.$@$.#\n#     #\n#######"))
    # A search finds this one; neither rule does.
    assert not is_deadlocked(level(WRONG_SIDE))


def test_a_block_of_four_boxes_is_frozen_and_one_of_three_is_not():
    room = "########\n#......#\n#  {}  #\n#  {}  #\n#  @   #\n########"
    four = room.format("$$", "$$").replace("......", "....  ")
    three = room.format("$$", "$ ").replace("......", "...   ")
    assert is_deadlocked(level(four))
    assert not is_deadlocked(level(three))


def test_the_bound_on_states_ends_the_search_without_a_verdict():
    found = solve(level(CORNER), fewest="pushes", max_states=1)
    assert (found.verdict, found.expanded, found.moves) == ("gave_up", 1, ())
    assert solve(level(CORNER), fewest="pushes", max_states=100).verdict == "solved"


@st.composite
def small_levels(draw):
    """Boards of 3x3 to 4x4 inner squares, most of them solvable and some not."""
    height, width = draw(st.integers(3, 4)), draw(st.integers(3, 4))
    boxes = draw(st.integers(1, 2))
    places = draw(st.permutations([(row, column) for row in range(height) for column in range(width)]))
    symbols = dict.fromkeys(places, " ")
    walls = draw(st.integers(0, 3))
    things = ["@", *"$" * boxes, *"." * boxes, *"#" * walls]
    symbols |= dict(zip(places, things, strict=False))
    inside = ["".join(symbols[row, column] for column in range(width)) for row in range(height)]
    return "\n".join(["#" * (width + 2), *(f"#{line}#" for line in inside), "#" * (width + 2)])


@settings(max_examples=150, deadline=None)
@given(text=small_levels(), fewest=st.sampled_from(MEASURES))
def test_the_solver_agrees_with_a_search_by_the_rules_alone(text, fewest):
    state = level(text)
    found = solve(state, fewest=fewest, max_states=100_000)
    best = shortest(state, fewest=fewest)
    assert found.verdict == ("unsolvable" if best is None else "solved")
    if best is None:
        return
    assert (found.pushes if fewest == "pushes" else len(found.moves)) == best
    played = play(state, found.moves)
    assert played.state.is_solved
    assert (played.valid, played.pushes, played.invalid) == (len(found.moves), found.pushes, ())


@settings(max_examples=100, deadline=None)
@given(text=small_levels())
def test_what_is_called_deadlocked_has_no_solution(text):
    if is_deadlocked(level(text)):
        assert shortest(level(text), fewest="pushes") is None


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="#.$*@+ -\n", max_size=30))
def test_any_text_of_symbols_is_a_level_with_a_verdict_or_is_refused(text):
    try:
        state = read_state(text)
    except LevelError:
        return
    assert solve(state, fewest="pushes", max_states=50).verdict in ("solved", "unsolvable", "gave_up")
