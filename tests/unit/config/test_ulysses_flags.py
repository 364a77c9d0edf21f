"""`--ds.ulysses_size`: what it needs of other flags, and what OpenRLHF is told."""

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.errors import UserError
from lmm_r1.host.strategy import to_openrlhf_args


def ppo(**changes: object) -> PPOConfig:
    flags = {
        "actor.model_name_or_path": "m",
        "data.prompt_dataset": "d",
        "reward.remote_url": "http://127.0.0.1:5000/get_reward",
        "actor.num_gpus_per_node": 4,
        "ref.num_gpus_per_node": 4,
        "rollout.batch_size": 32,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 32,
        "ds.ulysses_size": 2,
    }
    return dotted.replace(PPOConfig(), flags | changes)


def sft(**changes: object) -> SFTConfig:
    flags = {"model.model_name_or_path": "m", "data.dataset": "d", "ds.ulysses_size": 2, "ds.packing_samples": True}
    return dotted.replace(SFTConfig(), flags | changes)


def test_openrlhf_counts_the_ranks_of_a_row_as_those_of_its_ring_attention():
    assert to_openrlhf_args(resolve(ppo())).ds.ring_attn_size == 2
    assert to_openrlhf_args(resolve(sft())).ds.ring_attn_size == 2
    assert to_openrlhf_args(resolve(sft(**{"ds.ulysses_size": 1}))).ds.ring_attn_size == 1


def test_groups_with_a_shared_prefix_are_packed_rows_too():
    one_sample = {"rollout.n_samples_per_prompt": 1, "algo.advantage.estimator": "reinforce"}
    assert ppo().train.shared_prefix_enable
    resolve(ppo())
    resolve(ppo(**one_sample, **{"ds.packing_samples": True}))
    with pytest.raises(UserError, match="splits packed sequences; add --ds.packing_samples"):
        resolve(ppo(**one_sample))
