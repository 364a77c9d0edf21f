import re

import numpy as np
import pytest

from lmm_r1.tasks import split_of
from lmm_r1.tasks.sokoban import SokobanTask, draw_board, room_name
from remote_rm.sokoban_board import play, solve
from remote_rm.sokoban_levels import board_text, read_plan, read_state

TASK = SokobanTask()


def make(modality, *, split="train", rows=12, seed=0, task=TASK):
    return list(task.generate(split=split, modality=modality, rows=rows, seed=seed))


def test_a_row_has_a_state_and_its_optimum_and_no_label():
    for row in make("mixed"):
        record = row.record(solution=False)
        assert "answer" not in record
        state = read_state(record["state"])
        assert not state.is_solved
        assert solve(state, fewest="pushes", max_states=10_000).pushes == record["optimal_pushes"]
        assert len(solve(state, fewest="moves", max_states=10_000).moves) == record["optimal_moves"]


def test_the_solution_of_a_row_solves_it_in_the_fewest_moves():
    for row in make("text"):
        played = play(read_state(row.columns["state"]), read_plan(row.solution).moves)
        assert played.state.is_solved
        assert (played.valid, played.invalid) == (row.columns["optimal_moves"], ())
        assert re.fullmatch(r"<think>Player \(\d, \d\)\. .*</think><answer>(\w+, )*\w+</answer>", row.solution)


def test_the_prompt_shows_the_board_as_text_or_as_a_picture():
    text, image = make("mixed", rows=2)
    state = read_state(text.columns["state"])
    assert board_text(state, floor="-") in text.messages[0]["content"]
    picture, question = image.messages[0]["content"]
    drawn = draw_board(read_state(image.columns["state"]), tile_px=28)
    assert np.array_equal(np.asarray(picture["image"]), np.asarray(drawn))
    assert picture["image"].size == (168, 168)
    assert "<answer>Left, Up, Right, Down</answer>" in question["text"]


def test_rows_are_those_of_their_seed_and_a_longer_file_begins_like_a_shorter_one():
    assert make("mixed", rows=4, seed=3) == make("mixed", rows=8, seed=3)[:4]
    assert make("mixed", rows=4, seed=3) != make("mixed", rows=4, seed=4)
    assert make("mixed", rows=4)[1::2] == make("image", rows=4)[1::2]


def test_train_and_test_share_no_room():
    for split in ("train", "test"):
        for row in make("text", split=split):
            assert split_of(f"sokoban {room_name(read_state(row.columns['state']).room)}") == split


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"boxes": 0}, "0 boxes"),
        ({"tile_px": 7}, "tiles of 7 px"),
        ({"image_share": 2.0}, "image_share 2.0 is a share"),
    ],
)
def test_wrong_settings_are_refused_as_they_are_given(settings, said):
    with pytest.raises(ValueError, match=said):
        SokobanTask(**settings)
