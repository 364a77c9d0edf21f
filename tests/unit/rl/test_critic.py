"""PPO's critic by hand-computed numbers: advantages and returns, the clipped loss, and what a pass reports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.rl_steps import StepParts
from helpers.tables import table
from openrlhf.models import ValueLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from torch.distributed.device_mesh import init_device_mesh

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.lmm_kits import Media
from lmm_r1.rl.workers import GroupReplayBuffer, KitCriticActor, KitCriticPPOTrainer, KitRewardActor

pytestmark = pytest.mark.usefixtures("one_process")

SETTINGS = table("rl/critic", "settings")
IMAGE: Media = {"pixel_values": torch.ones(1)}


def experience_maker(*, kl_coef: float, **changes: object) -> StepParts:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    config = resolve(dotted.replace(PPOConfig(), SETTINGS | given))
    return StepParts(config, kl_weight=kl_coef)


def experience(
    values: list[list[float]],
    *,
    rewards: list[float],
    loss_mask: list[list[int]],
    kl: list[list[float]],
    first: int = 0,
) -> Experience:
    count = len(rewards)
    return Experience(
        sequences=torch.zeros(count, len(values[0]) + 1, dtype=torch.long),
        values=torch.tensor(values),
        rewards=torch.tensor(rewards),
        action_mask=torch.tensor(loss_mask),
        kl=torch.tensor(kl),
        index=list(range(first, first + count)),
    )


def two_samples(kl: float = 0.0) -> list[Experience]:
    """A response of three tokens that is rewarded with 8, and one of two tokens that is not."""
    values, loss_mask = [[1.0, 2.0, 4.0], [2.0, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]]
    return [experience(values, rewards=[8.0, 0.0], loss_mask=loss_mask, kl=[[0.0, kl, 0.0], [0.0, 0.0, 0.0]])]


def test_returns_are_those_of_gae_by_hand():
    (made,) = experience_maker(kl_coef=0.0).with_advantages(two_samples())
    # First:  deltas 8 - 4, 4/2 - 2, 2/2 - 1 = 4, 0, 0; advantages backwards 4, 0 + 4/4 = 1, 0 + 1/4 = 0.25.
    # Second: deltas 0 - 1, 1/2 - 2 = -1, -1.5;         advantages backwards -1, -1.5 - 1/4 = -1.75.
    assert made.returns.tolist() == [[1.25, 3.0, 8.0], [0.25, 0.0, 0.0]]
    # Less their mean 0.5, divided by the root of (0.25^2 + 0.5^2 + 3.5^2 + 2.25^2 + 1.5^2) / 5 = 3.975.
    expected = torch.tensor([[-0.25, 0.5, 3.5], [-2.25, -1.5, 0.0]]) / 3.975**0.5
    torch.testing.assert_close(made.advantages * made.action_mask, expected)


def test_advantages_keep_their_size_where_they_are_not_divided():
    maker = experience_maker(kl_coef=0.0, algo__advantage__no_std_norm=True)
    (made,) = maker.with_advantages(two_samples())
    assert (made.advantages * made.action_mask).tolist() == [[-0.25, 0.5, 3.5], [-2.25, -1.5, 0.0]]


def test_the_kl_penalty_of_a_token_is_part_of_its_reward():
    (made,) = experience_maker(kl_coef=0.25).with_advantages(two_samples(kl=2.0))
    # The second token's reward is -0.25 x 2: advantages backwards 4, -0.5 + 4/4 = 0.5, 0 + 0.5/4 = 0.125.
    assert made.returns[0].tolist() == [1.125, 2.5, 8.0]


def test_samples_of_several_passes_are_normalized_together():
    whole, parts = two_samples(), two_samples()
    (pass_of_both,) = parts
    parts = [
        experience(
            pass_of_both.values[index : index + 1].tolist(),
            rewards=[8.0, 0.0][index : index + 1],
            loss_mask=pass_of_both.action_mask[index : index + 1].tolist(),
            kl=[[0.0] * 3],
            first=index,
        )
        for index in range(2)
    ]
    (together,) = experience_maker(kl_coef=0.0).with_advantages(whole)
    apart = experience_maker(kl_coef=0.0).with_advantages(parts)
    torch.testing.assert_close(torch.cat([made.advantages for made in apart]), together.advantages)
    torch.testing.assert_close(torch.cat([made.returns for made in apart]), together.returns)


def test_the_loss_takes_the_worse_of_a_value_and_its_clipped_one():
    values = torch.tensor([[2.0, 0.0, 5.0]], requires_grad=True)
    old, returns, loss_mask = (
        torch.tensor([[1.0, 0.2, 0.0]]),
        torch.tensor([[3.0, 1.0, 0.0]]),
        torch.tensor([[1, 1, 0]]),
    )
    loss = ValueLoss(0.5)(values, old, returns, action_mask=loss_mask)
    # 1 + 0.5 is further from 3 than 2 is: 1.5^2 = 2.25; 0 is within 0.5 of 0.2: 1; half of their mean.
    assert loss.item() == pytest.approx(0.5 * (2.25 + 1.0) / 2)
    loss.backward()
    # Only what is not clipped learns: the derivative of 0.5 x 1^2 / 2 at a distance of -1.
    assert values.grad.tolist() == [[0.0, -0.5, 0.0]]


class PlayedCritic:
    """Plays DeepSpeed's engine around a critic whose values are given, and keeps what it is asked for."""

    def __init__(self, values: list[list[float]]) -> None:
        self.values = torch.tensor(values, requires_grad=True)
        self.media: list[list[Media | None]] = []
        self.calls: list[tuple[str, Any]] = []

    def __call__(
        self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor, **given: Any
    ) -> Any:
        self.media.append(given["media"])
        values = self.values * action_mask
        return (values, None) if given.get("return_output") else values

    def train(self) -> None:
        self.calls.append(("train", None))

    def eval(self) -> None:
        self.calls.append(("eval", None))

    def set_gradient_accumulation_boundary(self, ends: bool) -> None:
        self.calls.append(("ends a step", ends))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.calls.append(("step", None))


def played_strategy() -> SimpleNamespace:
    return SimpleNamespace(
        config=dotted.replace(PPOConfig(), {"train.batch_size": 3}),
        ds_device_mesh=init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "sp", "tp")),
        ring_attn_group=None,
        backward=lambda loss, model, optimizer: model.backward(loss),
        optimizer_step=lambda optimizer, model, scheduler, name: model.step(),
        get_grad_norm=lambda model: 3.0,
    )


def critic_trainer(critic: PlayedCritic, passes: list[Experience]) -> KitCriticPPOTrainer:
    """A trainer of which only what the passes need is set up."""
    trainer = object.__new__(KitCriticPPOTrainer)
    trainer.critic, trainer.strategy = critic, played_strategy()
    trainer.critic_loss_fn, trainer.critic_optim = ValueLoss(0.5), None
    # Of the next update, once one is made.
    trainer.critic_scheduler = SimpleNamespace(get_last_lr=lambda: [0.5 if ("step", None) in critic.calls else 0.25])
    trainer.replay_buffer = GroupReplayBuffer(7, dynamic_batch=True)
    for experience in passes:
        trainer.replay_buffer.append(experience)
    trainer.replay_buffer.setup_dynamic_batch(trainer.strategy)
    return trainer


def one_pass(
    *, loss_mask: list[list[int]], old: list[list[float]], returns: list[list[float]], media: list[Media | None]
) -> Experience:
    shape = (len(loss_mask), len(loss_mask[0]) + 1)
    return Experience(
        sequences=torch.zeros(shape, dtype=torch.long),
        attention_mask=torch.ones(shape, dtype=torch.long),
        action_mask=torch.tensor(loss_mask),
        values=torch.tensor(old),
        returns=torch.tensor(returns),
        mm_train_inputs=media,
    )


def test_the_passes_of_an_optimizer_step_add_up_to_its_loss_and_get_their_media():
    # One optimizer step of 4 tokens in two passes, of 3 tokens and of 1.
    first = one_pass(
        loss_mask=[[1, 1], [1, 0]], old=[[0.0, 0.0], [0.0, 0.0]], returns=[[1.0, 0.0], [0.0, 0.0]], media=[IMAGE, None]
    )
    second = one_pass(loss_mask=[[1, 0]], old=[[0.0, 0.0]], returns=[[2.0, 0.0]], media=[None])
    values = ([[0.25, 0.5], [-0.5, 7.0]], [[1.0, 7.0]])
    statuses, calls, gradients = [], [], []
    for step, (experience, given) in enumerate(zip((first, second), values, strict=True)):
        critic = PlayedCritic(given)
        trainer = critic_trainer(critic, [first, second])
        statuses.append(trainer.training_step(experience, step))
        assert trainer.critic is critic
        assert critic.media == [experience.mm_train_inputs]
        calls.append(critic.calls)
        gradients.append(critic.values.grad.tolist())
    assert calls == [
        [("ends a step", False), ("train", None)],
        [("ends a step", True), ("train", None), ("step", None)],
    ]
    # Halves of squared errors over 4 tokens: (0.75^2 + 0.5^2 + 0.5^2) / 8, and clipped (2 - 0.5)^2 / 8.
    means = {name: sum(status[name] for status in statuses) / 2 for name in statuses[0]}
    assert means["critic_loss"] == pytest.approx((0.5625 + 0.25 + 0.25 + 2.25) / 8)
    assert means["values"] == pytest.approx((0.25 + 0.5 - 0.5 + 1.0) / 4)
    assert means["returns"] == pytest.approx((1.0 + 2.0) / 4)
    assert means["critic_grad_norm"] == 3.0
    assert means["critic_lr"] == 0.25
    # Distances to the returns over 4 tokens; the clipped value does not learn.
    assert gradients == [[[-0.1875, 0.125], [-0.125, 0.0]], [[0.0, 0.0]]]


def test_a_critic_worker_gets_the_media_of_a_batch_and_trains_on():
    critic = PlayedCritic([[1.0, 2.0]])
    worker = object.__new__(KitCriticActor)
    worker.critic, worker.strategy = critic, played_strategy()
    mask = torch.ones(1, 3)
    values = worker.forward(torch.zeros(1, 3), torch.tensor([[0, 1]]), mask, mm_train_inputs_list=[IMAGE])
    assert values.tolist() == [[0.0, 2.0]]
    assert critic.media == [[IMAGE]]
    worker.forward(torch.zeros(1, 3), torch.tensor([[0, 1]]), mask)
    assert critic.media[1] == []
    assert critic.calls == [("eval", None), ("train", None)] * 2
    assert worker.critic is critic


def test_a_reward_worker_asks_for_the_rewards_of_whole_samples_with_their_media():
    asked = []

    def model(sequences: torch.Tensor, **given: Any) -> torch.Tensor:
        asked.append(given)
        return torch.tensor([0.5, -1.0])

    worker = object.__new__(KitRewardActor)
    worker.model, worker.strategy = model, SimpleNamespace(ring_attn_group=None)
    rewards = worker.forward(
        torch.zeros(2, 3), torch.ones(2, 3), pad_sequence=True, mm_train_inputs_list=[None, IMAGE]
    )
    assert rewards.tolist() == [0.5, -1.0]
    (given,) = asked
    assert given.keys() == {"attention_mask", "ring_attn_group", "media"}
    assert given["media"] == [None, IMAGE]
