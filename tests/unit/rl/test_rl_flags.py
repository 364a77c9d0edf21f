"""What flags of reinforcement learning do to losses, rewards and prompts, by hand-computed numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.played_updates import PlayedEngine, PlayedStrategy
from helpers.rl_steps import sample
from helpers.tables import frozen, table

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.config.hardware import needed_gpus
from lmm_r1.rl.losses import LossSettings, PolicyLoss
from lmm_r1.rl.outputs import shape_rewards
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor
from lmm_r1.train.update import Step, update

pytestmark = pytest.mark.usefixtures("one_process")
GIVEN = table("rl/rl_flags", "given")


def config(**flags: object) -> PPOConfig:
    return resolve(dotted.replace(PPOConfig(), GIVEN | {name.replace("__", "."): to for name, to in flags.items()}))


def step_of(
    ratios: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    rollout: float = 1.0,
    reference: float = 1.0,
    **flags: object,
) -> tuple[Step, torch.Tensor]:
    """A step of one pass, whose loss is all that is differentiated; `ratios` are probabilities over the old ones, which are `rollout` times the engine's.

    Returns also the gradient of the log-probs.

    Args:
        reference: the policy's old probabilities over the reference model's.
    """
    log_probs = torch.tensor([[math.log(ratio) if ratio else 0.0 for ratio in own] for own in ratios])
    log_probs.requires_grad_(True)
    samples = []
    for own, advantage in zip(ratios, advantages, strict=True):
        one = sample([1], [2] * len(own))
        one.loss_mask = torch.tensor([ratio > 0 for ratio in own])
        one.log_probs, one.advantages = torch.zeros(len(own)), torch.full((len(own),), advantage)
        one.engine_log_probs = one.log_probs - math.log(rollout)
        one.reference_log_probs = one.log_probs - math.log(reference)
        samples.append(one)
    settings = config(**flags)
    worker = object.__new__(KitPolicyActor)
    worker.strategy, worker.loss = PlayedStrategy(settings), PolicyLoss.of(settings)
    output = SimpleNamespace(entropy=torch.full_like(log_probs, 0.5), aux_loss=torch.tensor(8.0))
    worker._run = lambda samples, **asked: (log_probs, output)
    found: list[torch.Tensor] = []
    worker.strategy.backward = lambda loss, *rest: found.append(loss) or loss.backward()
    step = update(
        worker.strategy,
        PlayedEngine(),
        [samples],
        counts=worker._counts,
        terms=lambda samples: worker._terms(samples, kl_weight=0.5),
        aux_weight=settings.actor.aux_loss_coef,
    )
    return replace(step, loss=found[0].item()), log_probs.grad


def loss_of(*given: Any, **flags: Any) -> float:
    return step_of(*given, **flags)[0].loss


def test_a_loss_with_further_terms_has_a_gradient_without_advantages():
    in_rewards = {"algo.kl.init_coef": 0.1}
    for flags in ({}, {"actor.entropy_coef": 0.0}, in_rewards):
        assert LossSettings.of(dotted.replace(config(), flags)).follows_advantages
    own = {"actor.policy_loss_type": "mine.py:loss"}
    for flags in (own, {"actor.entropy_coef": 0.01}, {**in_rewards, "algo.kl.use_loss": True}):
        assert not LossSettings.of(dotted.replace(config(), flags)).follows_advantages


def test_ratios_are_clipped_on_each_side():
    assert loss_of([[1.5]], [1.0]) == pytest.approx(-1.2)
    assert loss_of([[1.5]], [1.0], actor__eps_clip=0.1) == pytest.approx(-1.1)
    both = {"actor__eps_clip_low_high": (0.4, 0.3)}
    assert loss_of([[1.5]], [1.0], **both) == pytest.approx(-1.3)
    assert loss_of([[0.5]], [-1.0], **both) == pytest.approx(0.6)


def test_a_dual_clip_bounds_the_loss_of_bad_samples():
    assert loss_of([[5.0]], [-1.0]) == pytest.approx(5.0)
    assert loss_of([[5.0]], [-1.0], actor__dual_clip=3.0) == pytest.approx(3.0)


def test_ratios_are_of_tokens_or_of_sequences():
    wide = {"actor__eps_clip": 0.6}
    assert loss_of([[1.5, 1.0]], [1.0], **wide) == pytest.approx(-1.25)
    found = loss_of([[1.5, 1.0]], [1.0], **wide, actor__policy_loss_type="gspo")
    assert found == pytest.approx(-math.sqrt(1.5))


def test_losses_are_means_over_tokens_or_over_sequences():
    assert loss_of([[1.0, 1.0], [1.0, 0.0]], [1.0, 4.0]) == pytest.approx(-(1 + 1 + 4) / 3)
    each = {"actor__loss_agg_mode": "seq-mean-token-mean"}
    assert loss_of([[1.0, 1.0], [1.0, 0.0]], [1.0, 4.0], **each) == pytest.approx(-(1 + 4) / 2)


def test_sums_of_sequences_are_divided_by_the_length_of_the_flag_or_of_the_longest_response():
    constant = {"actor__loss_agg_mode": "seq-mean-token-sum-norm"}
    given = [[1.0, 1.0], [1.0, 0.0]], [1.0, 4.0]
    assert loss_of(*given, **constant, actor__loss_agg_length=3) == pytest.approx(-(2 + 4) / 3 / 2)
    assert loss_of(*given, **constant, rollout__max_new_tokens=5) == pytest.approx(-(2 + 4) / 5 / 2)
    # All turns of an episode are as long as prompt and turns together may be.
    episodes = {"train__agent": "crop", "data__max_len": 10}
    assert config(**constant, rollout__max_new_tokens=5, **episodes).actor.loss_agg_length == 10
    assert config(**constant, data__max_len=12).actor.loss_agg_length == 12


@pytest.mark.parametrize(
    ("flags", "loss"), frozen("rl/rl_flags", "samples_that_the_engine_drew_otherwise_are_corrected")
)
def test_samples_that_the_engine_drew_otherwise_are_corrected(flags, loss):
    assert loss_of([[1.0]], [1.0], rollout=10.0, **flags) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("gating", "bound", "loss"),
    # Of probabilities 1 and 0.1 the ratio is 10 and the total variation 0.9; the binary KL is 12.1, as 1 is rounded.
    [
        ("ratio", 5.0, 0.0),
        ("ratio", 11.0, -10.0),
        ("tv", 5.0, -10.0),
        ("binary_kl", 11.0, 0.0),
        ("binary_kl", 13.0, -10.0),
    ],
)
def test_what_the_thresholds_bound_may_be_a_divergence(gating, bound, loss):
    flags = {
        "algo__advantage__is_correction_level": "token",
        "algo__advantage__is_correction_threshold": (0.0, bound),
        "algo__advantage__is_correction_gating": gating,
    }
    assert loss_of([[1.0]], [1.0], rollout=10.0, **flags) == pytest.approx(loss, rel=1e-5)


def test_entropy_is_worth_a_bonus():
    assert loss_of([[1.0]], [1.0], actor__entropy_coef=0.0) == pytest.approx(-1.0)
    assert loss_of([[1.0]], [1.0], actor__entropy_coef=0.5) == pytest.approx(-1.0 - 0.5 * 0.5)


OTHER_TERMS = {
    "kl": {"algo__kl__use_loss": True, "algo__kl__estimator": "k3"},
    "entropy": {"actor__entropy_coef": 0.5},
}


@pytest.mark.parametrize(("estimator", "kl"), [("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))])
def test_the_kl_to_the_reference_is_a_loss_by_its_estimator(estimator, kl):
    flags = {"algo__kl__use_loss": True, "algo__kl__estimator": estimator}
    # By the weight that the trainer is given, 0.5.
    assert loss_of([[1.0]], [1.0], reference=2.0, **flags) == pytest.approx(-1 + 0.5 * kl, rel=1e-5)


@pytest.mark.parametrize(("loss", "length"), [("ppo", None), ("gspo", None), ("ppo", 4)])
@pytest.mark.parametrize(("term", "flags"), OTHER_TERMS.items())
def test_kl_and_entropy_are_averaged_as_the_policy_loss_is(term, flags, loss, length):
    mode = "seq-mean-token-sum-norm" if length else "seq-mean-token-mean" if loss == "ppo" else "token-mean"
    flags = flags | {"actor__policy_loss_type": loss, "actor__loss_agg_mode": mode, "actor__loss_agg_length": length}
    # One token with a KL of k3(log 2) = 0.1931, three whose policy is the reference's, and entropies of 0.5 each.
    found = loss_of([[2.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [0.0, 0.0], **flags)
    if term == "kl":
        expected = 0.5 * (0.5 - 1 + math.log(2)) / (2 * (length or 1))
    else:
        expected = -0.5 * (0.5 + 3 * 0.5) / (2 * length) if length else -0.5 * 0.5
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_the_kl_may_be_the_exact_one():
    flags = {"algo__kl__use_loss": True, "algo__kl__estimator": "k3"}
    biased, exact = (
        step_of([[1.0]], [0.0], reference=2.0, algo__kl__unbiased_gradient=unbiased, **flags)[1].item()
        for unbiased in (False, True)
    )
    # Half of k3's own derivative, 1 - exp(-log 2); the exact one adds k3's value times that of the sample's log-prob.
    assert biased == pytest.approx(0.25, abs=1e-5)
    assert exact != pytest.approx(biased, abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({}, [1.0, 1.0, 1.0]),
        # Lengths 5, 8 and 10 of at most 10.
        ({"reward__overlong_buffer_len": 4.0}, [1.0, 0.5, 0.0]),
        ({"reward__overlong_buffer_len": 4.0, "reward__overlong_penalty_factor": 2.0}, [1.0, 0.0, -1.0]),
        ({"reward__stop_properly_penalty_coef": 0.25}, [1.0, 1.0, 0.25]),
        ({"reward__stop_properly_penalty_coef": -0.5}, [1.0, 1.0, -0.5]),
    ],
)
def test_long_and_cut_off_responses_lose_reward(flags, left):
    samples = [sample([1], [2] * length, reward=1.0) for length in (5, 8, 10)]
    samples[2].truncated = True
    shape_rewards(samples, config(rollout__max_new_tokens=10, **flags))
    assert [one.reward for one in samples] == pytest.approx(left)


SIZES = {"actor": (2, 2), "ref": (1, 4), "critic": (1, 3), "reward": (2, 1)}


@pytest.mark.parametrize(("flags", "gpus"), table("rl/rl_flags", "a_run_asks_for_the_gpus_of_its_models_and_engines"))
def test_a_run_asks_for_the_gpus_of_its_models_and_engines(flags, gpus):
    sizes = {
        f"{name}.{flag}": number
        for name, pair in SIZES.items()
        for flag, number in zip(("num_nodes", "num_gpus_per_node"), pair, strict=True)
    }
    engines = {"vllm.num_engines": 3, "vllm.tensor_parallel_size": 2}
    assert needed_gpus(dotted.replace(PPOConfig(), sizes | engines | flags)) == gpus


def test_the_critics_values_are_clipped_to_the_range_of_the_flag():
    for clip in (0.5, 5.0):
        worker = object.__new__(KitCriticActor)
        worker.strategy = PlayedStrategy(dotted.replace(PPOConfig(), {"critic.value_clip": clip}))
        # From 0 to 2 where 3 is right: 2 is held at the clip's bound.
        worker._run = lambda samples: torch.tensor([[2.0]])
        one = sample([1], [2])
        one.values, one.returns = torch.zeros(1), torch.tensor([3.0])
        assert worker._terms([one]).loss.item() == pytest.approx(max((3 - min(2.0, clip)) ** 2, 1.0) / 2)
