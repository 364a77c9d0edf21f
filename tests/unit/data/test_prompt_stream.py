import pytest
from helpers.conversations import message, row

from lmm_r1.data.prompt_stream import PromptStream, check_prompts
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


def stream(*, rows=10, episodes=2, seed=3):
    return PromptStream(list(range(rows)), seed=seed, episodes=episodes)


def test_an_episode_gives_every_row_once_and_the_next_one_another_order():
    prompts = stream()
    assert prompts.has(10)
    first = prompts.take(10)
    assert prompts.has(10)
    second = prompts.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert not prompts.has(1)


def test_the_next_episode_begins_whatever_is_left_and_behind_the_last_there_is_nothing():
    prompts, whole = stream(), stream()
    whole.take(10)
    whole.has(10)
    prompts.take(3)
    assert prompts.next_episode()
    assert prompts.take(20) == whole.take(10)
    assert prompts.take(1) == []
    assert not prompts.next_episode()
    assert prompts.take(1) == []
    assert not prompts.has(1)


def test_the_order_depends_on_the_seed_alone():
    assert stream().take(10) == stream().take(10)
    assert stream().take(10) != stream(seed=4).take(10)


def test_a_stream_taken_up_again_goes_on_with_the_same_rows():
    uninterrupted, stopped = stream(), stream()
    for prompts in (uninterrupted, stopped):
        assert prompts.has(7)
        prompts.take(7)
        assert prompts.has(4)  # moves on: three rows are left of the first episode
        prompts.take(4)
    state = stopped.state_dict()
    assert state == {"episode": 1, "position": 4}

    resumed = stream()
    resumed.load_state_dict(state)
    assert resumed.take(6) == uninterrupted.take(6)
    assert not resumed.has(1)


def test_a_finished_stream_stays_finished_when_taken_up_again():
    prompts = stream(episodes=1)
    prompts.take(10)
    assert not prompts.has(1)
    resumed = stream(episodes=1)
    resumed.load_state_dict(prompts.state_dict())
    assert not resumed.has(1)


def test_the_last_rows_of_an_episode_can_be_taken_but_are_no_full_batch():
    prompts = stream(episodes=1)
    assert prompts.has(10)
    assert len(prompts.take(8)) == 8
    assert prompts.has(2)
    assert len(prompts.take(5)) == 2
    assert prompts.take(5) == []
    assert not prompts.has(1)


def test_more_rows_than_there_are_can_never_be_had():
    assert not stream().has(11)


def test_a_prompt_that_ends_with_the_answer_is_refused_with_its_place():
    prompt = row(message("user", "What is 1 + 1?"))
    check_prompts([prompt])
    with pytest.raises(UserError, match="rows.jsonl, line 1: a prompt for RL must not end with an assistant turn"):
        check_prompts([prompt, row(message("user", "What is 1 + 1?"), message("assistant", "2"))])
