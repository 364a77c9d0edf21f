"""The benchmark of the visual search: what it reads of the runs, and the control's environment."""

import json

import pytest
from helpers.episodes import coordinates_image, image_row, play, text_of
from tool_off import ToolOff
from visual_search import estimate, summary

from lmm_r1.agents.tool_environment import CropEnvironment

pytestmark = pytest.mark.unit

CALL = '<grounding>{"bbox_2d": [0, 0, 0.5, 0.5], "source": "original_image"}</grounding>'


def test_a_share_has_wilsons_interval():
    # z^2 / n = 0.038416: the middle stays 0.5, and half the interval is 1.96 * sqrt(0.0025 + 0.00009604) / 1.038416.
    assert estimate(0.5, rows=100) == {"share": 0.5, "low": 0.4038, "high": 0.5962}
    assert estimate(0.0, rows=100)["low"] == 0.0


def test_a_run_is_summed_up_by_its_first_and_last_evaluation(tmp_path):
    lines = [
        {"step": 0, "seconds": 3.0, "eval_s_pass1": 0.25, "eval_s_pass4": 0.5},
        {"step": 1, "seconds": 10.0, "reward": 0.5, "turns": 2.0, "tool_calls": 1.0},
        {"step": 3, "seconds": 20.0, "reward": 0.75, "turns": 2.0, "tool_calls": 1.5},
        {"step": 3, "seconds": 22.0, "eval_s_pass1": 0.75, "eval_s_pass4": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "stage.json").write_text(json.dumps({"seconds": 25.0}))
    found = summary(tmp_path, rows=100)
    assert (found["success_before"]["share"], found["success_after"]["share"]) == (0.25, 0.75)
    assert (found["gain_points"], found["steps"], found["seconds"], found["seconds_per_step"]) == (50.0, 3, 25.0, 10.0)
    assert found["evaluations"] == [(0, 0.25), (3, 0.75)]
    assert (found["first_step"]["tool_calls"], found["last_step"]["tool_calls"]) == (1.0, 1.5)


def test_the_control_explains_the_tool_and_never_shows_a_part():
    row = image_row(coordinates_image(64, 64))
    assert ToolOff().shown_row(row) == CropEnvironment().shown_row(row)
    (answered,) = play(ToolOff(), row, CALL)
    assert "the tool is switched off" in text_of(answered)
    assert "<image>" not in text_of(answered)
    assert answered.counts == {"tool_calls": 1, "malformed_calls": 1, "failed_calls": 0}
