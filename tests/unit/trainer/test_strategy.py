"""Learning rates per parameter group."""

import pytest
import torch

from lmm_r1.trainer.strategy import split_groups

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
