"""Worked episodes, in which the environment answers turns that are written already, and the environment that asks twice."""

import asyncio

import pytest
from helpers.episodes import answers_of, coordinates_image, image_row, play_episode, row_of, texts_of

from lmm_r1.agents.double_check import DoubleCheck
from lmm_r1.agents.environment import demonstration_of
from lmm_r1.agents.tool_environment import CropEnvironment
from lmm_r1.data.messages import ImagePart, TextPart, images_of
from lmm_r1.errors import UserError
from lmm_r1.tasks.digits import DigitsTask

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


RIGHT, WRONG = "<think>3+4</think><answer>7</answer>", "<think>3+4</think><answer>8</answer>"


@pytest.mark.parametrize(
    ("first", "second", "rewards", "counts"),
    [
        (RIGHT, RIGHT, {"accuracy": 1.0, "spoiled": 0.0}, (1, 0, 0)),
        (WRONG, RIGHT, {"accuracy": 1.0, "spoiled": 0.0}, (0, 1, 1)),
        (RIGHT, WRONG, {"accuracy": 0.0, "spoiled": -1.0}, (1, 1, 0)),
        (WRONG, WRONG, {"accuracy": 0.0, "spoiled": 0.0}, (0, 0, 0)),
        ("no idea", "", {"accuracy": 0.0, "spoiled": 0.0}, (0, 1, 0)),
    ],
)
def test_the_last_answer_counts_and_giving_up_a_right_one_costs(first, second, rewards, counts):
    played = play_episode(DoubleCheck(), row_of(answer="7"), first, second)
    assert [answered.is_over for answered in played.answers] == [False, True]
    assert "Are you sure?" in texts_of(played.answers[0].shown)
    assert played.answers[0].rewards == {}
    assert played.rewards == rewards
    assert tuple(played.counts[name] for name in ("first_right", "changed", "mended")) == counts


@pytest.mark.parametrize("modality", ["text", "image"])
def test_the_solutions_of_the_digits_are_right(modality):
    for row in DigitsTask().generate(split="train", modality=modality, rows=20, seed=0):
        played = play_episode(DoubleCheck(), row_of(answer=row.answer), row.solution, row.solution)
        assert played.rewards["accuracy"] == 1.0
