"""PPO's critic by hand-computed numbers: advantages and returns, the clipped loss, and what a step reports."""

from typing import Any

import pytest
import torch
from helpers.played_updates import PlayedEngine, PlayedStrategy
from helpers.rl_steps import StepParts, numbered, sample
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.lmm_kits import Media
from lmm_r1.models.packed.packing import ModelSample, stacked
from lmm_r1.rl.losses import value_loss
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.rl.workers import KitCriticActor

pytestmark = pytest.mark.usefixtures("one_process")

SETTINGS = table("rl/critic", "settings")
IMAGE: Media = {"pixel_values": torch.ones(1)}


def estimated(samples: list[TrainingSample], *, kl_coef: float = 0.0, **changes: object) -> list[TrainingSample]:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    config = resolve(dotted.replace(PPOConfig(), SETTINGS | given))
    return StepParts(config, kl_weight=kl_coef).with_advantages(numbered(samples))


def two_samples(kl: float = 0.0) -> list[TrainingSample]:
    """A response of three tokens that is rewarded with 8, and one of two tokens that is not."""
    first, second = sample([1], [2, 2, 2], reward=8.0), sample([1], [2, 2], reward=0.0)
    first.values, first.kl = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, kl, 0.0])
    second.values, second.kl = torch.tensor([2.0, 1.0]), torch.zeros(2)
    return [first, second]


def test_returns_are_those_of_gae_by_hand():
    first, second = estimated(two_samples())
    # First:  deltas 8 - 4, 4/2 - 2, 2/2 - 1 = 4, 0, 0; advantages backwards 4, 0 + 4/4 = 1, 0 + 1/4 = 0.25.
    # Second: deltas 0 - 1, 1/2 - 2 = -1, -1.5;         advantages backwards -1, -1.5 - 1/4 = -1.75.
    assert (first.returns.tolist(), second.returns.tolist()) == ([1.25, 3.0, 8.0], [0.25, 0.0])
    # Less their mean 0.5, divided by the root of (0.25^2 + 0.5^2 + 3.5^2 + 2.25^2 + 1.5^2) / 5 = 3.975.
    torch.testing.assert_close(first.advantages, torch.tensor([-0.25, 0.5, 3.5]) / 3.975**0.5)
    torch.testing.assert_close(second.advantages, torch.tensor([-2.25, -1.5]) / 3.975**0.5)


def test_advantages_keep_their_size_where_they_are_not_divided():
    first, second = estimated(two_samples(), algo__advantage__no_std_norm=True)
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([-0.25, 0.5, 3.5], [-2.25, -1.5])


def test_the_kl_penalty_of_a_token_is_part_of_its_reward():
    first, _ = estimated(two_samples(kl=2.0), kl_coef=0.25)
    # The second token's reward is -0.25 x 2: advantages backwards 4, -0.5 + 4/4 = 0.5, 0 + 0.5/4 = 0.125.
    assert first.returns.tolist() == [1.125, 2.5, 8.0]


def test_the_loss_takes_the_worse_of_a_value_and_its_clipped_one():
    values = torch.tensor([[2.0, 0.0, 5.0]], requires_grad=True)
    old, returns, mask = torch.tensor([[1.0, 0.2, 0.0]]), torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[1, 1, 0]])
    loss = value_loss(values, old, returns, mask, clip=0.5)
    # 1 + 0.5 is further from 3 than 2 is: 1.5^2 = 2.25; 0 is within 0.5 of 0.2: 1; half of their sum.
    assert loss.item() == pytest.approx(0.5 * (2.25 + 1.0))
    loss.backward()
    # Only what is not clipped learns: the derivative of 0.5 x 1^2 at a distance of -1.
    assert values.grad.tolist() == [[0.0, -1.0, 0.0]]
    # Without a clip both learn.
    assert value_loss(values, old, returns, mask, clip=None).item() == pytest.approx(0.5 * (1.0 + 1.0))


class PlayedModel(PlayedEngine):
    """A value model under DeepSpeed whose output in each pass is given; keeps what it is asked for."""

    def __init__(self, *outputs: list[Any]) -> None:
        super().__init__(outputs=[torch.tensor(one, requires_grad=True) for one in outputs])
        self.given: list[list[ModelSample]] = []
        self.settings: dict[str, Any] = {}
        self.modes: list[str] = []

    def __call__(self, samples: list[ModelSample], **settings: Any) -> torch.Tensor:
        self.given.append(samples)
        self.settings = settings
        found = self.outputs[len(self.given) - 1]
        return found if "of_samples" in settings else found * stacked(samples, lambda sample: sample.loss_mask)

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")


def worker_of(kind: type, model: PlayedModel, **flags: object) -> Any:
    worker = object.__new__(kind)
    worker.model, worker.strategy = model, PlayedStrategy(dotted.replace(PPOConfig(), flags))
    worker.empty_cache = lambda: None
    return worker


def learnt(
    *, mask: list[int], old: float = 0.0, returns: tuple[float, float] = (0.0, 0.0), media: Media | None = None
) -> TrainingSample:
    one = sample([1], [2, 2], group=7)
    one.loss_mask, one.values = torch.tensor(mask).bool(), torch.full((2,), old)
    one.returns, one.media = torch.tensor(returns), media
    return one


def test_the_passes_of_an_optimizer_step_add_up_to_its_loss_and_get_their_media():
    # One optimizer step of 4 tokens in two passes, of 3 tokens and of 1.
    first = [learnt(mask=[1, 1], returns=(1.0, 0.0), media=IMAGE), learnt(mask=[1, 0])]
    second = [learnt(mask=[1, 0], returns=(2.0, 0.0))]
    model = PlayedModel([[0.25, 0.5], [-0.5, 7.0]], [[1.0, 7.0]])
    metrics = worker_of(KitCriticActor, model, **{"critic.value_clip": 0.5}).fit([[first, second]])
    assert [[sample.media for sample in given] for given in model.given] == [[IMAGE, None], [None]]
    assert (model.modes, model.boundaries, model.steps) == (["train"], [False, True], 1)
    # Halves of squared errors over 4 tokens: (0.75^2 + 0.5^2 + 0.5^2) / 8, and clipped (2 - 0.5)^2 / 8.
    assert metrics == pytest.approx(
        {
            "critic_loss": (0.5625 + 0.25 + 0.25 + 2.25) / 8,
            "values": (0.25 + 0.5 - 0.5 + 1.0) / 4,
            "returns": (1.0 + 2.0) / 4,
            "critic_grad_norm": 3.0,
            "critic_lr": 0.25,
        }
    )
    # Distances to the returns over 4 tokens; the clipped value does not learn.
    gradients = [output.grad.tolist() for output in model.outputs]
    assert gradients == [[[-0.1875, 0.125], [-0.125, 0.0]], [[0.0, 0.0]]]
