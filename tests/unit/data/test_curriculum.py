"""Prompts ordered by what the run has measured of them, worked out by hand, and the same again after a stop."""

import pickle
import random

import numpy as np
import pytest

from lmm_r1.data.training_rows import MeasuredCurriculum, PromptStream, systematic, weights


def stream(kind: str, *, rows: int = 6, episodes: int = 4) -> PromptStream:
    return PromptStream(list(range(rows)), seed=3, episodes=episodes, curriculum=MeasuredCurriculum(kind, rows=rows))


def test_the_first_episode_is_shuffled_as_without_a_curriculum():
    plain = PromptStream(list(range(6)), seed=3, episodes=2)
    assert stream("easy_first").take(6) == plain.take(6)
    assert stream("uncertain").take(6) == PromptStream(list(range(6)), seed=3, episodes=2).take(6)


def test_easy_prompts_come_first_and_unknown_ones_in_the_middle():
    order = MeasuredCurriculum("easy_first", rows=5)
    order.note([0, 1, 2, 3], [0.25, 1.0, 0.0, 0.75])
    assert order.ordered([4, 3, 2, 1, 0], random.Random(0)) == [1, 3, 4, 0, 2]
    order.note([1, 2], [None, 0.9])
    assert order.ordered([0, 1, 2, 3, 4], random.Random(0)) == [1, 2, 3, 4, 0]
    # Of equal ones the shuffled order stays.
    order.note(range(5), [0.5] * 5)
    assert order.ordered([3, 1, 4, 0, 2], random.Random(0)) == [3, 1, 4, 0, 2]


def test_weights_are_those_of_the_variance_of_a_right_answer():
    # 4 x 0.25 x 0.75 = 0.75; rewards beyond 0 and 1 count as their ends.
    assert weights(np.array([0.5, 0.25, 0.0, 1.0, 1.5])).tolist() == [1.0, 0.75, 0.1, 0.1, 0.1]


def test_draws_are_the_expected_number_rounded_down_or_up():
    # Of 4 draws 1/2, 3/8, 1/16 and 1/16 are 2, 1.5, 0.25 and 0.25.
    shares = np.array([8.0, 6.0, 1.0, 1.0])
    assert systematic(shares, start=0.0) == [0, 0, 1, 1]
    assert systematic(shares, start=0.6) == [0, 0, 1, 2]
    assert systematic(shares, start=0.9) == [0, 0, 1, 3]
    assert systematic(np.ones(3), start=0.999) == [0, 1, 2]


def test_an_uncertain_prompt_is_taken_more_often_and_a_solved_one_less():
    order = MeasuredCurriculum("uncertain", rows=4)
    order.note(range(4), [0.5, 1.0, 0.0, 1.0])
    # Weights 1, 0.1, 0.1 and 0.1 of 1.3 in 4 draws: 3.08, and 0.31 each.
    counts = np.bincount(order.ordered(range(4), random.Random(1)), minlength=4)
    assert counts[0] in (3, 4)
    assert counts.sum() == 4


def played(prompts: PromptStream, *, until: int | None = None) -> list[int]:
    """Take two rows at a time to the end, of which higher ones are solved more often, and more so in later episodes."""
    seen: list[int] = []
    while prompts.has(2) and (until is None or len(seen) < until):
        rows = prompts.take(2)
        prompts.measured([None if row == 0 else min(1.0, row * (1 + prompts.episode) / 10) for row in rows])
        seen += rows
    return seen


@pytest.mark.parametrize("kind", ["easy_first", "uncertain"])
@pytest.mark.parametrize("stop", range(2, 24, 2))
def test_a_run_that_is_stopped_anywhere_takes_the_same_prompts_as_one_that_is_not(kind, stop):
    whole = played(stream(kind))
    first = stream(kind)
    seen = played(first, until=stop)
    state = first.state_dict()
    kept = pickle.dumps(state)
    # What is taken and measured after a save, and lost with a kill, is not in it.
    played(first, until=4)
    assert pickle.dumps(state) == kept
    second = stream(kind)
    second.load_state_dict(pickle.loads(kept))
    assert seen + played(second) == whole


def test_the_mean_of_what_was_measured_is_logged():
    prompts = stream("easy_first")
    assert prompts.solved is None
    prompts.take(3)
    prompts.measured([1.0, None, 0.5])
    assert prompts.solved == 0.75
    assert PromptStream([1], seed=0, episodes=1).solved is None
