import random
import re

import numpy as np
import pytest
from helpers.episodes import CORNER, IN_A_CORNER, ONE_PUSH, WRONG_SIDE
from helpers.tables import table
from helpers.verifiers import LARGE
from hypothesis import given, settings
from hypothesis import strategies as st

from lmm_r1.agents.sokoban import BOX, BOX_ON_GOAL, FLOOR, GOAL, PLAYER, WALL, draw_board
from lmm_r1.errors import UserError
from lmm_r1.tools.tasks import split_of
from lmm_r1.tools.tasks.sokoban import SokobanTask, room_name
from remote_rm.sokoban import MOVES, level_text, play, read_level, read_plan, solve

BOARDS = ("#######\n#@ $*.#\n#  $ .#\n#######", "######\n#+$ .#\n# $  #\n######")


@pytest.mark.parametrize("text", [*BOARDS, ONE_PUSH, "+$-"])
@pytest.mark.parametrize("floor", [" ", "-", "_"])
def test_text_becomes_a_level_and_the_same_text_again(text, floor):
    written = text.replace(" ", floor).replace("-", floor)
    assert level_text(read_level(f"\n{written}\n\n"), floor=floor) == written


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("#####\n#@x.#\n#####", "line 2, column 3 is 'x', no symbol of a board; they are # - _"),
        ("#####\n# $.#\n#####", r"there are 0 players \(@ or \+\); a level has one"),
        ("######\n#@$.+#\n######", "there are 2 players"),
        ("######\n#@$$.#\n######", "there are 2 boxes and 1 goals"),
        ("#####\n#@  #\n#####", "there are 0 boxes and 0 goals"),
        ("", "the board has 0 rows and 0 columns"),
        ("#" * 65 + "\n@$.", "the board has 2 rows and 65 columns"),
        (7, "a level is XSB text, not int"),
    ],
)
def test_what_is_no_level_is_refused_with_the_reason(value, said):
    with pytest.raises(ValueError, match=said):
        read_level(value)


def test_a_list_of_moves_is_played_over_what_is_invalid_and_ends_when_solved():
    # The second Right meets the wall. Left walks back, Left pushes, Up and Left walk around, Down pushes onto the goal.
    played = play(read_level(CORNER), read_plan("<answer>R R L L U L D U U</answer>").moves)
    assert (played.valid, played.pushes, played.invalid) == (6, 2, ((2, "Right"),))
    assert played.level.is_solved
    for blocked in ("####\n#@$#\n#. #\n####", "#######\n#@$$.#\n#.    #\n#######"):
        assert not read_level(blocked).allows("Right")


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        (ONE_PUSH, ("Right",)),
        (CORNER, ("Left", "Up", "Left", "Down")),
        ("####\n#@*#\n####", ()),
        (IN_A_CORNER, None),
        (WRONG_SIDE, None),
    ],
)
def test_shortest_solutions_are_those_worked_out_by_hand(text, moves):
    assert solve(read_level(text), max_states=1000) == moves
    assert solve(read_level(CORNER), max_states=2) is None


def test_from_between_two_boxes_the_best_takes_seven_moves():
    # Up, Left (above the left one), Down pushes; back Up, Right, Right (above the right one), Down pushes.
    level = read_level("#######\n#     #\n# $@$ #\n# . . #\n#     #\n#######")
    assert len(solve(level, max_states=10_000)) == 7


def test_a_level_is_lost_where_no_lone_box_could_be_pushed_to_a_goal():
    assert read_level(IN_A_CORNER).is_lost
    assert not read_level(CORNER).is_lost
    # The goal at (3, 1): rows 2 and 3 of columns 1 to 3 lead there; the upper and the right wall hold a box.
    places = ["@" + " " * 3, " " * 4, ".   "]
    alive = set()
    for row in range(3):
        for column in range(4):
            lines = [list(line) for line in places]
            if lines[row][column] == " ":
                lines[row][column] = "$"
                text = "\n".join(["######", *(f"#{''.join(line)}#" for line in lines), "######"])
                alive |= {(row, column)} if not read_level(text).is_lost else set()
    assert alive == {(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)}


@st.composite
def small_levels(draw):
    places = draw(st.permutations([(row, column) for row in range(3) for column in range(3)]))
    boxes = draw(st.integers(1, 2))
    symbols = dict.fromkeys(places, " ")
    symbols |= dict(zip(places, ["@", *"$" * boxes, *"." * boxes, *"#" * draw(st.integers(0, 2))], strict=False))
    return "\n".join(["#####", *("#" + "".join(symbols[r, c] for c in range(3)) + "#" for r in range(3)), "#####"])


@settings(max_examples=60, deadline=None)
@given(text=small_levels())
def test_the_solver_agrees_with_a_search_by_the_rules_alone(text):
    """Level by level of the tree of moves, without pruning."""
    start = read_level(text)
    seen, newest, moves = {start}, [start], 0
    while newest and not any(level.is_solved for level in newest):
        newest = {level.after(move) for level in newest for move in MOVES if level.allows(move)} - seen
        seen |= newest
        moves += 1
    found = solve(start, max_states=100_000)
    assert (None if found is None else len(found)) == (moves if newest else None)
    assert found is None or play(start, found).level.is_solved


@pytest.mark.parametrize(("text", "moves"), table("tasks/sokoban_plan", "moves_are_read_however_they_are_written"))
def test_moves_are_read_however_they_are_written(text, moves):
    plan = read_plan(text)
    assert "".join(move[0] for move in plan.moves) == moves
    assert (plan.is_answer, plan.stops) == (True, False)


def test_words_that_name_no_move_are_told_from_moves_and_giving_up_is_an_answer_of_its_own():
    plan = read_plan("<answer>right, jump, 3 down</answer>")
    assert (plan.moves, plan.unread) == (("Right", "Down"), ("jump", "3"))
    for text in ("", "I would go right.", "<think>right</think>", "12", "\ud800"):
        assert (read_plan(text).moves, read_plan(text).is_answer) == ((), False)
    stop = read_plan("<answer> STOP! </answer>")
    assert (stop.moves, stop.unread, stop.is_answer, stop.stops) == ((), (), True, True)


@pytest.mark.parametrize("text", LARGE, ids=lambda text: text[:12])
def test_a_megabyte_of_anything_is_read_in_no_time(text):
    assert read_plan(text).stops is False
    assert read_plan(f"<answer>{text}</answer>").stops is False


@pytest.mark.parametrize("text", BOARDS)
@pytest.mark.parametrize("tile_px", [8, 13, 28])
def test_a_drawn_board_is_read_back(text, tile_px):
    """By the middle of each tile, and for the player by whether there is red around."""
    middles = {WALL: "#", FLOOR: " ", GOAL: ".", BOX: "$", BOX_ON_GOAL: "*", PLAYER: "@"}
    pixels = np.asarray(draw_board(read_level(text), tile_px=tile_px))
    lines = []
    for top in range(0, pixels.shape[0], tile_px):
        line = ""
        for left in range(0, pixels.shape[1], tile_px):
            tile = pixels[top : top + tile_px, left : left + tile_px]
            symbol = middles[tuple(map(int, tile[tile_px // 2, tile_px // 2]))]
            line += "+" if symbol == "@" and (tile == GOAL).all(axis=2).any() else symbol
        lines.append(line)
    assert "\n".join(lines) == text


def make(modality, *, split="train", rows=6, seed=0, **settings):
    return list(SokobanTask(**settings).generate(split=split, modality=modality, rows=rows, seed=seed))


@pytest.mark.parametrize(
    "bounds", [{}, {"boxes": 2, "min_pushes": 4, "max_pushes": 10}, {"height": 5, "width": 8, "wall_share": 0.0}]
)
def test_rows_are_unsolved_levels_within_the_bounds_with_a_shortest_solution(bounds):
    task = SokobanTask(**bounds)
    for row in make("text", **bounds):
        assert "answer" not in row.record(solution=False)
        level = read_level(row.columns["state"])
        assert not level.is_solved
        assert (level.height, level.width, len(level.boxes)) == (task.height, task.width, task.boxes)
        assert level_text(level).splitlines()[0] == "#" * task.width
        played = play(level, read_plan(row.solution).moves)
        assert (played.level.is_solved, played.invalid) == (True, ())
        assert played.valid == row.columns["optimal_moves"] == len(solve(level, max_states=100_000))
        assert task.min_pushes <= played.pushes <= task.max_pushes
        assert re.fullmatch(r"<think>Player \(\d, \d\)\. .*</think><answer>(\w+, )*\w+</answer>", row.solution)


def test_the_prompt_shows_the_board_as_text_or_as_a_picture():
    text, image = make("mixed", rows=2)
    assert level_text(read_level(text.columns["state"]), floor="-") in text.messages[0]["content"]
    picture, question = image.messages[0]["content"]
    assert np.array_equal(picture["image"], draw_board(read_level(image.columns["state"]), tile_px=28))
    assert "<answer>Left, Up, Right, Down</answer>" in question["text"]


def test_rows_are_those_of_their_seed_and_train_and_test_share_no_room():
    assert make("mixed", rows=4, seed=3) == make("mixed", rows=6, seed=3)[:4]
    assert make("mixed", rows=4, seed=3) != make("mixed", rows=4, seed=4)
    for split in ("train", "test"):
        for row in make("text", split=split):
            assert split_of(f"sokoban {room_name(read_level(row.columns['state']))}") == split


def test_a_room_has_one_name_however_it_is_turned_or_mirrored():
    text = "######\n#  #.#\n#$@  #\n######"
    lines = text.split("\n")
    mirrored = "\n".join(line[::-1] for line in lines)
    turned = "\n".join("".join(column) for column in zip(*lines[::-1], strict=True))
    assert len({room_name(read_level(shown)) for shown in (text, mirrored, turned)}) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"height": 2}, "a board of 2 rows and 6 columns"),
        ({"boxes": 0}, "0 boxes: a level has at least one"),
        ({"min_pushes": 9}, "9 to 8 pushes"),
        ({"wall_share": 1.0}, "wall_share 1.0 must be"),
        ({"boxes": 7}, "7 boxes on 16 squares inside the walls, of which 2 are wall: too many"),
        ({"tile_px": 7}, "tiles of 7 px"),
        ({"image_share": 2.0}, "image_share 2.0 is a share"),
    ],
)
def test_bounds_that_no_level_meets_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        SokobanTask(**settings)


def test_pushes_that_no_room_of_the_size_takes_end_with_what_to_ask_instead():
    task = SokobanTask(height=4, width=4, wall_share=0.0, min_pushes=40, max_pushes=50)
    with pytest.raises(UserError, match="no level of 40 to 50 pushes with 1 boxes on 4 x 4 squares .* larger board"):
        task.make(random.Random(0), split="train")
