import pytest

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.errors import UserError
from lmm_r1.scoring.sources import RowClient, make_scorer


def source(url: str):
    return make_scorer(RewardConfig(remote_url=url, timeout_s=1.0, deadline_s=1.0))


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
