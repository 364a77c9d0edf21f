"""Worked episodes, in which the environment answers turns that are written already."""

import asyncio

import pytest
from helpers.episodes import answers_of, coordinates_image, image_row

from lmm_r1.agents.environment import demonstration_of
from lmm_r1.agents.tool_environment import CropEnvironment
from lmm_r1.data.messages import ImagePart, TextPart, images_of
from lmm_r1.errors import UserError

CALL = '<think>small</think><grounding>{"bbox_2d": [0.25, 0.5, 0.75, 1.0], "source": "original_image"}</grounding>'
ANSWER = "<answer>exit</answer>"


def test_a_worked_call_is_answered_with_the_part_that_it_names():
    environment, row = CropEnvironment(), image_row(coordinates_image(100, 100))
    messages = demonstration_of(environment, row, (CALL, ANSWER))
    assert [message.role for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[:2] == environment.shown_row(row).messages
    assert [messages[place].parts for place in (2, 4)] == [(TextPart(CALL),), (TextPart(ANSWER),)]
    (part,) = images_of(messages[3:4])
    assert part.source.size == (50, 50)
    assert part.source.getpixel((0, 0)) == (25, 50, 7)
    assert (part.min_pixels, part.max_pixels) == (40_000, 2_000_000)


def test_it_is_what_an_episode_shows():
    environment, row = CropEnvironment(prefill="<think>"), image_row(coordinates_image(64, 64))
    turns = (CALL, f"<think>{CALL}", f"<think>{ANSWER}")
    messages = demonstration_of(environment, row, turns)
    answers = asyncio.run(answers_of(environment, row, turns))
    shown = [[part for part in answered.shown if isinstance(part, TextPart)] for answered in answers[:2]]
    assert [[p for p in messages[place].parts if not isinstance(p, ImagePart)] for place in (3, 5)] == shown
    assert len(images_of(messages)) == 3


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ((ANSWER, CALL), "the episode is over with turn 1 of the 2 worked ones"),
        ((CALL,), "the episode continues after the 1 worked turns"),
        ((CALL, ANSWER), "turn 2 must begin with '<think>', the prefill of the environment"),
    ],
)
def test_turns_that_do_not_make_an_episode_are_told_with_the_rows_place(turns, said):
    environment = CropEnvironment(prefill="<think>")
    with pytest.raises(UserError) as raised:
        demonstration_of(environment, image_row(coordinates_image(64, 64)), turns)
    assert str(raised.value) == f"rows.jsonl, line 1, environment crop: {said}"
