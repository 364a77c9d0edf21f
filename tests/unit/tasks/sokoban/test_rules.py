import pytest
from helpers.episodes import CORNER, ONE_PUSH, level, state_record

from remote_rm.sokoban_board import play
from remote_rm.sokoban_levels import LevelError, board_text, coordinates_text, read_state

EVERY_SYMBOL = "#######\n#@ $*.#\n#  $ .#\n#######"
ON_A_GOAL = "#####\n#+$ #\n#####"


def test_a_move_walks_pushes_or_is_held_by_a_wall_or_a_box():
    state = level("#######\n#@ $$.#\n#.    #\n#######")
    assert (state.player, state.boxes) == ((1, 1), {(1, 3), (1, 4)})
    assert state.obstacle("U") == "there is a wall"
    assert state.after("U") is None
    beside = state.after("R")
    assert (beside.player, beside.boxes) == ((1, 2), state.boxes)
    assert beside.is_push("R")
    assert beside.obstacle("R") == "the box there stands before another box"
    assert beside.after("R") is None
    assert level("####\n#@$#\n#. #\n####").obstacle("R") == "the box there stands before a wall"
    assert state.after("D").after("R").after("R").after("U") is None


def test_a_push_moves_box_and_player_and_solves_the_level():
    start = level(ONE_PUSH)
    solved = start.after("R")
    assert not start.is_solved
    assert solved.is_solved
    assert (solved.player, solved.boxes) == ((1, 2), {(1, 3)})
    assert board_text(solved) == "#####\n# @*#\n#####"


def test_equal_states_are_one_key():
    start = level(CORNER)
    around = start.after("U").after("D")
    assert around == start
    assert len({start, around, start.after("U")}) == 2


def test_a_list_of_moves_is_played_over_what_is_invalid_and_ends_when_solved():
    played = play(level(CORNER), ["R", "R", "L", "L", "U", "L", "D", "U", "U"])
    # The second R meets the wall. L walks back, L pushes, U and L walk around, D pushes the box onto the goal.
    assert (played.valid, played.pushes) == (6, 2)
    assert played.invalid == ((2, "R", "there is a wall"),)
    assert played.state.is_solved


@pytest.mark.parametrize("floor", [" ", "-", "_"])
def test_text_becomes_a_state_and_the_same_text_again(floor):
    text = EVERY_SYMBOL.replace(" ", floor)
    assert board_text(read_state(text), floor=floor) == text
    assert read_state(text) == read_state(EVERY_SYMBOL)
    assert read_state(f"\n  \n{text}\n\n") == read_state(EVERY_SYMBOL)
    assert read_state(text.split("\n")) == read_state(EVERY_SYMBOL)


def test_coordinates_count_from_1_and_become_the_same_state_again():
    state = read_state(EVERY_SYMBOL)
    record = state_record(state)
    assert (record["height"], record["width"], record["player"]) == (4, 7, [2, 2])
    assert record["goals"] == [[2, 5], [2, 6], [3, 6]]
    assert record["boxes"] == [[2, 4], [2, 5], [3, 4]]
    assert coordinates_text(level(ONE_PUSH)).splitlines()[:4] == [
        "3 rows, 5 columns; (row, column), (1, 1) at the top left.",
        "Player: (2, 2)",
        "Boxes: (2, 3)",
        "Goals: (2, 4)",
    ]


@pytest.mark.parametrize("text", [ONE_PUSH, CORNER, EVERY_SYMBOL, ON_A_GOAL])
def test_a_record_in_coordinates_is_read_back(text):
    assert read_state(state_record(level(text))) == level(text)
    assert board_text(level(text)) == text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("#####\n#@x.#\n#####", "line 2, column 3 is 'x', no symbol of a board; they are '#' wall"),
        ("#####\n# $.#\n#####", r"there are 0 players \(@ or \+\); a level has one"),
        ("######\n#@$.+#\n######", "there are 2 players"),
        ("#####\n#@ .#\n#####", "there is no box"),
        ("######\n#@$$.#\n######", "there are 2 boxes and 1 goals"),
        ("", "the board has 0 rows and 0 columns"),
        ("#" * 65 + "\n@$.", "the board has 2 rows and 65 columns"),
        (7, "a level is XSB text, a list of its lines, or an object .*, not int"),
        (None, "not NoneType"),
        (["#@$.", 3], "not list"),
        ({"height": 3}, '"width" is missing'),
        ({**state_record(level(ONE_PUSH)), "height": "3"}, "\"height\" is '3'; a whole number"),
        ({**state_record(level(ONE_PUSH)), "boxes": [[2]]}, r'"boxes" holds \[2\]'),
        ({**state_record(level(ONE_PUSH)), "boxes": "none"}, "\"boxes\" is 'none'; a list of"),
        ({**state_record(level(ONE_PUSH)), "player": [2, 9]}, r"\(2, 9\) lies outside of 3 rows and 5 columns"),
        ({**state_record(level(ONE_PUSH)), "player": [2, 3]}, "one square holds two things"),
        ({**state_record(level(ONE_PUSH)), "goals": [[1, 1]]}, "one square holds two things"),
    ],
)
def test_what_is_no_level_is_refused_with_the_reason(value, said):
    with pytest.raises(LevelError, match=said):
        read_state(value)
