"""Learning rates per parameter group, and what DeepSpeed is told of batches."""

import pytest
import torch

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig, to_openrlhf_args
from lmm_r1.trainer.strategy import make_strategy, split_groups

pytestmark = pytest.mark.unit


def test_members_get_groups_of_their_own_at_their_rate_and_keep_the_rest_of_their_settings():
    decayed, vision, bias = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = [{"params": [decayed, vision], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    assert split_groups(groups, members={id(vision)}, lr=5e-4) == [
        {"params": [decayed], "weight_decay": 0.1},
        {"params": [vision], "weight_decay": 0.1, "lr": 5e-4},
        {"params": [bias], "weight_decay": 0.0},
    ]


def test_a_group_of_members_only_leaves_no_empty_group():
    vision = torch.nn.Parameter(torch.zeros(1))
    assert split_groups([{"params": [vision]}], members={id(vision)}, lr=1.0) == [{"params": [vision], "lr": 1.0}]


def test_in_rl_deepspeed_knows_of_no_number_of_passes():
    config = dotted.replace(PPOConfig(), {"train.batch_size": 12, "train.micro_batch_size": 8})
    strategy = make_strategy(to_openrlhf_args(config))
    trained, held = strategy.get_ds_train_config(), strategy.get_ds_eval_config()
    assert (trained["train_micro_batch_size_per_gpu"], trained["gradient_accumulation_steps"]) == (1, 1)
    # On its number of processes, whatever that is, DeepSpeed finds a whole number of passes.
    assert (held["train_micro_batch_size_per_gpu"], held["train_batch_size"]) == (1, 12)


def test_in_supervised_training_deepspeed_counts_passes():
    config = dotted.replace(SFTConfig(), {"train.batch_size": 12, "train.micro_batch_size": 4})
    trained = make_strategy(to_openrlhf_args(config)).get_ds_train_config()
    assert (trained["train_micro_batch_size_per_gpu"], trained["train_batch_size"]) == (4, 12)
