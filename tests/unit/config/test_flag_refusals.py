"""Values of flags that would have no effect are refused by name, with what to take instead."""

import pytest
from helpers.tables import frozen, table

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit

RL = {
    "actor.model_name_or_path": "model",
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "data.prompt_dataset": "rows.jsonl",
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.n_samples_per_prompt": 8,
}
SFT = {"model.model_name_or_path": "model", "data.dataset": "rows.jsonl"}
LORA = {"ds.lora.rank": 8}
REFUSED_IN_RL = frozen("config/flag_refusals", "refused_in_rl")
REFUSED_IN_SFT = table("config/flag_refusals", "refused_in_sft")


def case(changes: dict[str, object]) -> str:
    return " ".join(changes)


@pytest.mark.parametrize(("changes", "instead"), REFUSED_IN_RL, ids=[case(changes) for changes, _ in REFUSED_IN_RL])
def test_what_has_no_effect_in_rl_is_refused(changes, instead):
    with pytest.raises(UserError) as refused:
        resolve(dotted.replace(PPOConfig(), RL | changes))
    assert f"--{next(iter(changes))}" in str(refused.value)
    assert instead in str(refused.value)


@pytest.mark.parametrize(("changes", "instead"), REFUSED_IN_SFT, ids=[case(changes) for changes, _ in REFUSED_IN_SFT])
def test_what_has_no_effect_in_supervised_training_is_refused(changes, instead):
    with pytest.raises(UserError) as refused:
        resolve(dotted.replace(SFTConfig(), SFT | changes))
    assert instead in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    table("config/flag_refusals", "what_goes_together_is_taken"),
    ids=case,
)
def test_what_goes_together_is_taken(changes):
    resolve(dotted.replace(SFTConfig(), SFT | changes))
