"""Small functions of a step that take the place of OpenRLHF's give the same numbers."""

import pytest
import torch
from helpers.rl_steps import sample
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.host.strategy import to_openrlhf_args
from lmm_r1.rl.advantages import KLWeight
from lmm_r1.rl.losses import estimated_kl
from lmm_r1.rl.outputs import shape_rewards
from lmm_r1.rl.samples import TrainingSample


def config(**changes: object) -> PPOConfig:
    given = {"rollout.max_new_tokens": 6, **{name.replace("__", "."): value for name, value in changes.items()}}
    return dotted.replace(PPOConfig(), given)


def responses() -> list[TrainingSample]:
    """Responses of 1 to 6 tokens, of which those of 3 and of 6 are cut."""
    samples = [sample([1, 2], [5] * length, reward=0.1 * length) for length in (1, 6, 3, 5, 4, 2)]
    for one in samples:
        one.truncated = one.response_tokens % 3 == 0
    return samples


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_openrlhfs(estimator):
    generator = torch.Generator().manual_seed(0)
    policy, reference = (8 * torch.randn(50, 40, generator=generator) for _ in range(2))
    expected = compute_approx_kl(policy, reference, kl_estimator=estimator)
    assert torch.equal(estimated_kl(policy - reference, estimator=estimator), expected)


@pytest.mark.parametrize("buffer", [None, 2.0, 4.0, 6.0])
@pytest.mark.parametrize("scale", [None, 0.0, 0.7, 1.0, -0.5])
def test_length_penalties_are_openrlhfs(buffer, scale):
    changes = {"reward__overlong_buffer_len": buffer, "reward__overlong_penalty_factor": 0.3}
    settings = config(**changes, reward__stop_properly_penalty_coef=scale)
    ours = responses()
    theirs = Experience(
        rewards=torch.tensor([one.reward for one in ours], dtype=torch.double),
        response_length=torch.tensor([one.response_tokens for one in ours]),
        truncated=torch.tensor([one.truncated for one in ours]),
        info={},
    )
    shape_rewards(ours, settings)
    apply_length_penalties([theirs], to_openrlhf_args(settings))
    assert [one.reward for one in ours] == pytest.approx(theirs.rewards.tolist(), rel=1e-7)
    assert [one.logged["reward"] for one in ours] == [one.reward for one in ours]


def test_an_adaptive_kl_weight_is_openrlhfs():
    ours, theirs = KLWeight(value=0.1, target=0.5, horizon=100), AdaptiveKLController(0.1, 0.5, 100)
    for kl in (0.1, 0.45, 0.5, 0.55, 3.0):
        ours.update(kl, samples=8)
        theirs.update(kl, 8)
        assert ours.value == theirs.value
    fixed = KLWeight(value=0.1)
    fixed.update(3.0, samples=8)
    assert fixed.value == 0.1
