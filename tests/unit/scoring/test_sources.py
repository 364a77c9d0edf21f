import asyncio
from pathlib import Path

import pytest
from helpers.conversations import message, row
from helpers.tables import table

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.errors import UserError
from lmm_r1.scoring.functions import FunctionScorer, ScoredResponse
from lmm_r1.scoring.sources import RowClient, make_scorer


def reward_file(folder: Path, reply: str) -> str:
    path = folder / "reward.py"
    path.write_text(f"import torch\n\ndef reward_func(queries, prompts, labels):\n    return {reply}\n")
    return str(path)


def source(url: str):
    return make_scorer(RewardConfig(remote_url=url, timeout_s=1.0, deadline_s=1.0))


def score(path: str):
    scorer = source(path)
    assert isinstance(scorer, FunctionScorer)
    one = ScoredResponse(row=row(message("user", "p")), prompt="p", query="q", response="r", num_tokens=1)
    (item,) = asyncio.run(scorer.rewards([one]))
    return item


@pytest.mark.parametrize(
    "reply",
    [
        "{'rewards': torch.tensor([2.0]), 'scores': torch.tensor([1.0]), 'extra_logs': {'accuracy': torch.tensor([0.5])}}",
        "{'rewards': [2.0], 'scores': [1.0], 'extra_logs': {'accuracy': [0.5]}}",
        "{'rewards': 2, 'scores': 1, 'extra_logs': {'accuracy': 0.5}}",
    ],
)
def test_tensors_lists_and_numbers_are_read_alike(tmp_path, reply):
    item = score(reward_file(tmp_path, reply))
    assert (item.reward, item.score, item.parts) == (2.0, 1.0, {"accuracy": 0.5})


def test_the_function_gets_lists_of_one(tmp_path):
    reply = "{'rewards': [float((queries, prompts, labels) == (['q'], ['p'], ['46']))]}"
    assert score(reward_file(tmp_path, reply)).reward == 1.0


@pytest.mark.parametrize(
    ("reply", "said"), table("scoring/sources", "what_is_no_reward_of_one_response_is_told_with_the_file")
)
def test_what_is_no_reward_of_one_response_is_told_with_the_file(tmp_path, reply, said):
    with pytest.raises(UserError, match=f"reward.py: reward_func gave no usable reward .*{said}"):
        score(reward_file(tmp_path, reply))


def test_a_file_that_gives_no_rewards_is_a_user_error(tmp_path):
    (tmp_path / "empty.py").write_text("")
    for path, sentence in ((tmp_path / "none.py", "no such file"), (tmp_path / "empty.py", "defines no reward_func")):
        with pytest.raises(UserError, match=sentence):
            source(str(path))


def test_a_mistyped_verifier_is_answered_with_the_one_that_was_meant():
    with pytest.raises(UserError, match=r"^--reward mth: unknown verifier 'mth'; did you mean math\?"):
        source("mth")


def test_addresses_give_a_client_and_a_wrong_one_is_a_user_error():
    scorer = source("http://127.0.0.1:1/get_reward")
    assert isinstance(scorer, RowClient)
    with pytest.raises(UserError, match="--reward.remote_url: 'local.host' is no address"):
        source("local.host")
