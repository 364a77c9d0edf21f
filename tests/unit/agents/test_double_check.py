import pytest
from helpers.episodes import play_episode, row_of, texts_of

from lmm_r1.agents.environment import DoubleCheck
from lmm_r1.errors import UserError
from lmm_r1.tasks.digits import DigitsTask

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
    names = ("first_right", "changed", "mended")
    assert tuple(played.counts[name] for name in names) == counts


@pytest.mark.parametrize("modality", ["text", "image"])
def test_the_solutions_of_the_digits_are_right(modality):
    for row in DigitsTask().generate(split="train", modality=modality, rows=20, seed=0):
        played = play_episode(DoubleCheck(), row_of(answer=row.answer), row.solution, row.solution)
        assert played.rewards["accuracy"] == 1.0


def test_a_row_without_a_label_is_an_error_with_its_place():
    with pytest.raises(UserError, match="rows.jsonl, line 3: the row has no answer"):
        DoubleCheck().begin(row_of(), seed=0)
