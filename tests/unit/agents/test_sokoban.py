from dataclasses import replace

import numpy as np
import pytest
from helpers.episodes import CORNER, IN_A_CORNER, play_episode, row_of, texts_of

from lmm_r1.agents.sokoban import SokobanPlan, SokobanSteps, draw_board
from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.errors import UserError
from remote_rm.sokoban import level_text, read_level

TWO = "#######\n#@$ . #\n# $ . #\n#######"


def plan(moves):
    return f"<think>so</think><answer>{moves}</answer>"


def test_the_best_plan_earns_every_part():
    played = play_episode(SokobanPlan(), row_of(state=CORNER, optimal_moves=4), plan("Left, Up, Left, Down"))
    assert played.rewards == {"solved": 1.0, "boxes_on_goals": 1.0, "valid_moves": 1.0, "optimality": 1.0}
    assert (played.counts["moves"], played.counts["pushes"], played.counts["malformed"]) == (4, 2, 0)
    assert played.answers[0].is_over


def test_a_longer_plan_with_invalid_moves_earns_its_shares():
    # R, R against the wall, L back, then the best four; what follows the solution is not played.
    played = play_episode(SokobanPlan(), row_of(state=CORNER, optimal_moves=4), plan("R R L L U L D U U"))
    assert played.rewards["solved"] == 1.0
    assert played.rewards["valid_moves"] == pytest.approx(6 / 7)
    assert played.rewards["optimality"] == pytest.approx(4 / 6)
    assert (played.counts["moves"], played.counts["invalid_moves"], played.counts["pushes"]) == (6, 1, 2)


def test_a_plan_that_does_not_solve_earns_the_boxes_on_goals_and_its_valid_moves():
    # R R pushes the upper box onto its goal; D meets nothing, "jump" is no move.
    played = play_episode(SokobanPlan(), row_of(state=TWO), plan("R R jump U"))
    assert played.rewards == {"solved": 0.0, "boxes_on_goals": 0.5, "valid_moves": 0.5, "optimality": 0.0}
    assert (played.counts["unread_words"], played.counts["invalid_moves"]) == (1, 1)


@pytest.mark.parametrize("text", ["", "no idea", "<think>right</think>", "<answer></answer>"])
def test_no_plan_earns_nothing_and_is_over(text):
    played = play_episode(SokobanPlan(), row_of(state=CORNER), text)
    assert set(played.rewards.values()) == {0.0}
    assert played.counts["malformed"] == (text != "<answer></answer>")
    assert played.answers[0].is_over


def test_without_the_optimum_in_its_row_a_solution_earns_no_optimality():
    assert play_episode(SokobanPlan(), row_of(state=CORNER), plan("L U L D")).rewards["optimality"] == 0.0


def test_move_by_move_the_parts_add_up_to_what_they_are_at_the_end():
    played = play_episode(
        SokobanSteps(), row_of(state=CORNER, optimal_moves=4), plan("Left"), plan("Up, Up"), plan("L D")
    )
    assert [answered.is_over for answered in played.answers] == [False, False, True]
    assert played.rewards == pytest.approx(
        {"solved": 1.0, "boxes_on_goals": 1.0, "valid_moves": 4 / 5, "optimality": 1.0}
    )
    # After the first turn all moves written were valid; after the second two of three.
    assert played.answers[0].rewards["valid_moves"] == 1.0
    assert played.answers[1].rewards["valid_moves"] == pytest.approx(2 / 3 - 1)
    assert played.answers[2].rewards["solved"] == 1.0


def test_an_observation_says_what_was_not_done_and_shows_the_board():
    (answered,) = play_episode(SokobanSteps(views=("text", "image")), row_of(state=TWO), plan("R, U, hop")).answers
    told, board, picture = answered.shown
    assert told.text.splitlines() == [
        "Words that are not moves: hop.",
        "1 moves were blocked by a wall or a box, first 2 (Up).",
        "Moves made: 1. Boxes on goals: 0 of 2.",
    ]
    level = read_level(TWO).after("Right")
    assert board.text.strip() == level_text(level, floor="-")
    assert np.array_equal(np.asarray(picture.source), np.asarray(draw_board(level, tile_px=28)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("what now?", "No moves were found: write them as <answer>Right, Down</answer>."),
        ("<answer>well</answer>", "The answer contains no moves: they are Left, Up, Right and Down."),
    ],
)
def test_a_turn_without_moves_is_answered_and_counted(text, said):
    played = play_episode(SokobanSteps(), row_of(state=CORNER), text)
    assert said in texts_of(played.answers[0].shown)
    assert played.counts["malformed"] == ("<answer>" not in text)


def test_an_episode_ends_where_the_box_is_lost_unless_told_otherwise():
    row = row_of(state="######\n#    #\n# $@ #\n# .  #\n######")
    lost = play_episode(SokobanSteps(), row, plan("L"))
    # The box stands at the left wall, and the goal is not there.
    assert lost.answers[0].is_over
    assert lost.counts["deadlocked"] == 1
    going_on = play_episode(SokobanSteps(ends_when_deadlocked=False), row, plan("L"), plan("stop"))
    assert [answered.is_over for answered in going_on.answers] == [False, True]
    assert (going_on.counts["deadlocked"], going_on.counts["given_up"]) == (0, 1)


def test_an_episode_ends_after_as_many_turns_as_it_is_told():
    played = play_episode(SokobanSteps(max_turns=2), row_of(state=CORNER), plan("R"), plan("L"))
    assert [answered.is_over for answered in played.answers] == [False, True]


def test_every_turn_begins_as_the_row_says():
    row = replace(row_of(state=CORNER), prefill="<think>")
    (answered,) = play_episode(SokobanSteps(), row, plan("R")).answers
    assert answered.prefill == "<think>"


def test_a_row_that_shows_no_board_is_given_one():
    environment = SokobanPlan(views=("image", "text"))
    shown = environment.shown_row(row_of(state=CORNER)).messages[0].parts
    assert [type(part) for part in shown] == [TextPart, ImagePart, TextPart]
    assert environment.shown_row(row_of(CORNER, state=CORNER)) == row_of(CORNER, state=CORNER)
    dashed = row_of(f"Look:\n{CORNER.replace(' ', '-')}\nSolve it.", state=CORNER)
    assert environment.shown_row(dashed) == dashed
    pictured = replace(dashed, messages=(Message(role="user", parts=(ImagePart("board.png"), TextPart("Solve it."))),))
    assert environment.shown_row(pictured) == pictured


def test_step_by_step_the_policy_is_told_how():
    shown = SokobanSteps().shown_row(row_of(CORNER, state=CORNER)).messages[0].parts
    assert "<answer>stop</answer>" in shown[-1].text


@pytest.mark.parametrize("environment", [SokobanPlan(), SokobanSteps()])
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, r'rows.jsonl, line 3: no column "state" with a level of Sokoban'),
        ({"state": "###"}, r'rows.jsonl, line 3: "state" is not a Sokoban level: there are 0 players'),
        ({"state": 4}, "rows.jsonl, line 3: .*not int"),
        ({"state": CORNER, "optimal_moves": "few"}, "rows.jsonl, line 3: \"optimal_moves\" is 'few'"),
    ],
)
def test_a_row_without_a_level_is_an_error_with_its_place(environment, columns, said):
    with pytest.raises(UserError, match=said):
        environment.begin(row_of(**columns), seed=0)


def test_a_level_that_is_lost_from_the_start_ends_with_the_first_turn():
    played = play_episode(SokobanSteps(), row_of(state=IN_A_CORNER), plan("L"))
    assert played.answers[0].is_over


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"views": ("picture",)}, r"sokoban: views \('picture',\) must be a list of some of image, text"),
        ({"views": "image"}, "sokoban: views 'image' must be a list"),
        ({"views": ()}, "must be a list"),
        ({"tile_px": 7}, "sokoban: tile_px 7 must be at least 8"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        SokobanSteps(**options)
