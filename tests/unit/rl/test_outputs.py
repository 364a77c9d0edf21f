"""Samples become passes of the rollout's models and of the update, with groups and their media kept together."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
import torch
from helpers.rl_steps import PlayedGroup, StepParts, group, numbered, sample, trained
from helpers.samples import media_ref
from helpers.tables import table

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.sample import PlacedRef
from lmm_r1.rl.outputs import add_advantages, is_on_policy
from lmm_r1.rl.samples import Pass, TrainingSample, tree_tokens

SETTINGS = table("rl/outputs", "settings")


class Workers(PlayedGroup):
    """Workers of a model that give the first token of each sample plus a value, and keep what they are called with."""

    def __init__(self, value: float = 0.0, *, actors: int = 1, duplicates: int = 1, rewards: bool = False) -> None:
        super().__init__(*[self] * actors, duplicates=duplicates)
        self.value, self.rewards = value, rewards
        self.calls: list[tuple[str, list[list[Pass]]]] = []

    def start_shares(self, method: Callable[..., Any], shares: Sequence[list[Pass]], **named: Any) -> list[Any]:
        self.calls.append((method.__name__, list(shares)))
        return super().start_shares(method, shares)

    def forward(self, passes: list[Pass]) -> list[list[torch.Tensor]]:
        return [
            [(one.token_ids[0] + self.value).expand(() if self.rewards else len(one.loss_mask)) for one in part]
            for part in passes
        ]

    def reference_forward(self, passes: list[Pass]) -> list[list[torch.Tensor]]:
        return [[found - 0.5 for found in part] for part in self.forward(passes)]


@pytest.mark.parametrize(
    ("estimator", "bounds", "expected"),
    [
        # The clipped rewards 0, 10, 0 and 2 have a mean of 3 and a deviation of the root of 68 / 3.
        ("group_norm", (0.0, 10.0), [-0.6301, 1.4703, -0.6301, -0.2100]),
        ("dr_grpo", (-10.0, 10.0), [-0.5, 9.5, -10.5, 1.5]),
        ("dr_grpo", (-math.inf, math.inf), [2.0, 22.0, -28.0, 4.0]),
        # Less the greedy response's 40, clipped to 10.
        ("remax", (0.0, 10.0), [-10.0, 0.0, -10.0, -8.0]),
    ],
)
def test_rewards_are_clipped_before_they_are_compared(estimator, bounds, expected):
    flags = {"algo__advantage__estimator": estimator, "reward__clip_range": bounds}
    made = config(**flags, rollout__n_samples_per_prompt=4, algo__kl__init_coef=0.0)
    samples = numbered([sample([1], [5], reward=reward, group=0) for reward in (0.0, 20.0, -30.0, 2.0)])
    for one in samples:
        one.kl = torch.zeros(1)
    add_advantages(
        samples, made, kl_weight=0.0, greedy=[sample([1], [5], reward=40.0)] if estimator == "remax" else []
    )
    assert [one.advantages.item() for one in samples] == pytest.approx(expected, abs=1e-4)
    clipped = [min(max(r, bounds[0]), bounds[1]) for r in (0, 20, -30, 2)]
    assert [one.logged["reward"] for one in samples] == [one.reward for one in samples] == clipped


def test_equal_rewards_of_a_group_give_no_signal_whatever_they_are():
    rewards = [1 / 3, 1 / 3, 1 / 3, 0.9, 0.9, 0.9, 0.1, 0.1, 0.2, 0.0, 0.0, 0.0]
    samples = numbered([sample([1], [5], reward=reward, group=place // 3) for place, reward in enumerate(rewards)])
    for one in samples:
        one.kl = torch.zeros(1)
    add_advantages(samples, config(rollout__n_samples_per_prompt=3, algo__kl__init_coef=0.0), kl_weight=0.0)
    assert [one.logged["groups_without_signal"] for one in samples] == [1.0] * 6 + [0.0] * 3 + [1.0] * 3


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers answer at once."""
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(cpu, "has_cuda", lambda: True)


def config(**changes: object) -> PPOConfig:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(dotted.replace(PPOConfig(), SETTINGS | given))


def maker(*, share_prefix: bool = True, settings: PPOConfig | None = None, **groups: Workers) -> StepParts:
    made = StepParts(settings or config(), share_prefix=share_prefix, **{"policy": Workers(), **groups})
    made.mismatch.measure = lambda samples: setattr(made.mismatch, "checked", True)
    return made


def rollout() -> list[TrainingSample]:
    """Four groups of two: text, image, the same text with another image, and text again."""
    image, other = media_ref("image"), media_ref("other")
    return [
        *group([1, 2], [9, 1]),
        *group([3, 4, 5, 6], [2, 4], media=image),
        *group([3, 4, 5, 6], [6, 3], media=other),
        *group([7], [1, 1]),
    ]


def test_what_samples_of_a_group_share_is_computed_once(monkeypatch):
    monkeypatch.setattr("lmm_r1.data.sample.LEAST_SHARED", 1)
    samples = [sample([1, 2], response, group=0) for response in ([4, 5, 6], [4, 5, 7], [8])]
    assert tree_tokens(samples) == 2 + 2 + 1 + 1 + 1
    assert tree_tokens(samples[:2]) == 2 + 2 + 1 + 1
    # The same tokens, with the same picture and with another.
    one, other = (PlacedRef(3, media_ref(name), end=4) for name in ("one", "other"))
    for number, shown in enumerate((one, one, other)):
        samples[number] = sample([1, 2], [4, 9, 5, number], group=0)
        samples[number].media = (shown,)
    assert tree_tokens(samples) == 2 + 1 + (2 + 1 + 1) + 3


def updated_samples(steps: list[list[list[Pass]]]) -> list[list[list[int]]]:
    """The tokens of the samples of each optimizer step, sorted."""
    return [sorted(one.token_ids.tolist() for rank in step for part in rank for one in part) for step in steps]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("by_tokens", [True, False])
def test_an_optimizer_step_has_the_same_samples_however_they_are_computed(share_prefix, actors, by_tokens):
    def steps(made: StepParts, step: int) -> list[list[list[int]]]:
        samples = numbered(list(map(trained, rollout())))
        return updated_samples(made.update_passes(samples, step=step).steps)

    plain = maker(share_prefix=False)
    settings = config(train__dynamic_batch_enable=by_tokens, train__max_tokens_per_gpu=15)
    other = maker(share_prefix=share_prefix, policy=Workers(actors=actors), settings=settings)
    for step in range(4):
        assert steps(plain, step) == steps(other, step)
    assert len({str(steps(plain, step)) for step in range(4)}) > 1, "another order for every rollout"


@pytest.mark.parametrize(
    ("changes", "expected"),
    table("rl/outputs", "the_policy_makes_a_pass_for_old_log_probs_where_the_update_does_not_give_them"),
)
def test_the_policy_makes_a_pass_for_old_log_probs_where_the_update_does_not_give_them(changes, expected, answers):
    settings = config(**changes)
    assert is_on_policy(settings) is expected
    policy = Workers()
    made = maker(policy=policy, settings=settings)
    # The first step's log-probs are compared with the engine's before anything is learnt.
    first, later = (made.with_outputs(rollout()) for _ in range(2))
    assert [name for name, _ in policy.calls].count("forward") == (1 if expected else 2)
    for one in (*first, *later):
        assert (one.log_probs is None) == expected
    # What no pass is made for is not known, and never a number.
    if expected:
        assert not any(one.kl.any() for one in later)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_every_model_gets_the_passes_and_without_cuda_one_runs_after_the_other(has_cuda, answers, monkeypatch):
    waited = []
    monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
    monkeypatch.setattr(ray, "wait", lambda refs, *, num_returns, fetch_local: waited.append(refs[:num_returns]))
    workers = {name: Workers(duplicates=2, actors=2) for name in ("policy", "critic", "reference")}
    workers["reward"] = Workers(duplicates=2, actors=2, rewards=True)
    made = maker(**workers)
    samples = rollout()
    for one in samples:
        one.reward = None
    passes = made.forward_passes(samples)
    made.with_outputs(samples)
    for group_of_workers in workers.values():
        assert group_of_workers.calls == [("forward", [passes])]
    assert len(waited) == (0 if has_cuda else 4)


# With LoRA the policy, without its adapters, is the reference.
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("use_loss", [True, False])
def test_what_the_models_say_stands_in_the_samples(use_loss, rank, answers):
    workers = {"policy": Workers(-1.0), "critic": Workers(3.0), "reward": Workers(2.0, rewards=True)}
    if not rank:
        workers["reference"] = Workers(-1.5)
    made = maker(**workers, settings=config(algo__kl__use_loss=use_loss, train__batch_size=2, ds__lora__rank=rank))
    samples = rollout()
    for one in samples:
        one.reward = None
    for one in made.with_outputs(samples):
        width, first = len(one.loss_mask), one.token_ids[0].item()
        assert one.reward == one.logged["reward"] == first + 2.0
        assert one.log_probs.tolist() == [first - 1.0] * width
        assert one.values.tolist() == [first + 3.0] * width
        assert one.reference_log_probs.tolist() == [first - 1.5] * width
        # In the loss, or per token in the reward: log p - log q.
        assert one.kl.tolist() == [0.0 if use_loss else 0.5] * width
        for name in ("kl", "logprobs_diff"):
            assert one.logged.get(name) == (None if use_loss else 0.5)
