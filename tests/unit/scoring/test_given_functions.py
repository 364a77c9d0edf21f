"""A reward function that is in no file: one of a notebook, which Ray sends to the engines."""

import asyncio

import pytest
from helpers.conversations import message, row
from ray import cloudpickle

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.errors import UserError
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.sources import make_scorer
from remote_rm.verifier import Score

ROW = row(message("user", "1 + 1?"), answer="2")
CELL = """
BONUS = 0.5

def right(responses, labels, response_lengths):
    return [float(text == label) + BONUS * (count == 2) for text, label, count in zip(responses, labels, response_lengths)]
"""
BROKEN = "def right(responses):\n    return [1 / 0 for _ in responses]\n"


def of_a_notebook(cell: str):
    """The function `right` of a cell, as an engine's process has it."""
    module = {"__name__": "__main__"}
    exec(compile(cell, "<cell 3>", "exec"), module)
    return cloudpickle.loads(cloudpickle.dumps(module["right"]))


def scores(function, *responses: str) -> list[Score]:
    scorer = make_scorer(RewardConfig(remote_url="python:right"), given={"right": function})
    batch = [
        ScoredResponse(row=ROW, prompt="p", query="?", response=text, num_tokens=len(text) + 1) for text in responses
    ]
    return asyncio.run(scorer.rewards(batch))


def test_it_is_given_lists_by_the_names_of_its_parameters_with_what_it_uses_of_its_notebook():
    assert [score.reward for score in scores(of_a_notebook(CELL), "2", "22", "3")] == [1.5, 0.0, 0.5]


def test_where_it_fails_the_line_of_its_cell_is_told():
    told = "^--reward.remote_url <cell 3>, line 2: the reward function raised ZeroDivisionError: division by zero$"
    with pytest.raises(UserError, match=told):
        scores(of_a_notebook(BROKEN), "2")


def test_settings_that_name_it_without_it_say_where_it_came_from():
    told = "python:right is a function that was passed in Python; pass it again, or write it into a file"
    with pytest.raises(UserError, match=told):
        make_scorer(RewardConfig(remote_url="python:right"))
