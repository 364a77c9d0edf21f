import random

import pytest
from helpers.tables import table
from helpers.verifiers import LARGE

from remote_rm.sokoban_levels import read_plan


@pytest.mark.parametrize(("text", "moves"), table("tasks/sokoban/plan", "moves_are_read_however_they_are_written"))
def test_moves_are_read_however_they_are_written(text, moves):
    plan = read_plan(text)
    assert "".join(plan.moves) == moves
    assert plan.is_answer
    assert not plan.stops


def test_words_that_name_no_move_are_told_from_moves():
    assert read_plan("<answer>right, jump, 3 down</answer>").unread == ("jump", "3")
    assert read_plan("<answer>right, jump, 3 down</answer>").moves == ("R", "D")
    assert read_plan("<answer>hello</answer>").unread == ("hello",)


@pytest.mark.parametrize("text", ["", "I would go right.", "<think>right</think>", "right or left?", "12", "\ud800"])
def test_text_that_is_no_answer_holds_no_moves(text):
    plan = read_plan(text)
    assert (plan.moves, plan.is_answer, plan.stops) == ((), False, False)


@pytest.mark.parametrize("text", ["<answer>stop</answer>", "<answer> Give  up. </answer>", "<answer>STUCK!</answer>"])
def test_giving_up_is_an_answer_of_its_own(text):
    plan = read_plan(text)
    assert (plan.moves, plan.unread, plan.is_answer, plan.stops) == ((), (), True, True)


def test_five_hundred_malformed_plans_never_raise():
    rng = random.Random(0)
    pieces = [
        "<answer>",
        "</answer>",
        "<answer",
        "</think>",
        "Right",
        "up",
        "左",
        "→",
        "️",
        "\0",
        "\ud800",
        "1.",
        "9" * 50,
    ]
    pieces += [
        "{",
        "}",
        '"',
        "\\",
        "NaN",
        "None",
        "<|im_end|>",
        " ",
        "\n",
        ",",
        "lurd",
        "stop",
        "ﬀ",
        "İ",
        "ſ",
        "K",
        "１．",
    ]
    read = 0
    for _ in range(500):
        strange = [chr(rng.randrange(0x110000)) for _ in range(10)]
        text = rng.choice(["", "<answer>"]) + "".join(rng.choices(pieces + strange, k=rng.randint(0, 25)))
        plan = read_plan(text)
        assert set(plan.moves) <= set("LURD")
        assert plan.is_answer or not plan.moves
        read += bool(plan.moves)
    assert read > 100


@pytest.mark.parametrize("text", LARGE, ids=lambda text: text[:12])
def test_a_megabyte_of_anything_is_read_in_no_time(text):
    assert read_plan(text).stops is False
    assert read_plan(f"<answer>{text}</answer>").stops is False
