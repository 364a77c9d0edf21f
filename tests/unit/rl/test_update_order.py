"""When policy and critic are updated: in turn where they share cards or cores, at the same time where each has its own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
from helpers.rl_steps import PlayedGroup
from helpers.tables import table

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.rl.model_groups import Models, hand_out, trains_policy, update_models
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor

IN_TURN = ["critic starts", "critic is done", "policy starts", "policy is done"]


class NotingGroup(PlayedGroup):
    """Workers of one model, two of them, that note what they are handed and when they are told to fit."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(object(), object())
        self.name, self.calls = name, calls

    def hand_out(self, shares: Sequence[Any]) -> list[Any]:
        self.calls.append(f"{self.name} gets {shares}")
        return super().hand_out(shares)

    def start_shares(self, method: Callable[..., Any], shares: Sequence[Any], **named: float) -> list[str]:
        assert method is (KitPolicyActor.fit if self.name == "policy" else KitCriticActor.fit)
        assert named == ({"kl_weight": 0.5} if self.name == "policy" else {})
        self.calls.append(f"{self.name} starts")
        return [self.name, self.name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What groups and Ray are asked for, in order."""
    noted: list[str] = []

    def get(refs: list[str]) -> list[dict[str, float]]:
        noted.extend(f"{name} is done" for name in dict.fromkeys(refs))
        return [{f"{name}_loss": 1.0} for name in refs]

    monkeypatch.setattr(ray, "get", get)
    return noted


def models_of(calls: list[str], *, critic: bool = True) -> Models:
    """Return groups that note what they are asked for."""
    return Models(policy=NotingGroup("policy", calls), critic=NotingGroup("critic", calls) if critic else None)


def train(calls: list[str], *, step: int = 1, critic: bool = True, **flags: object) -> dict[str, float]:
    config = dotted.replace(PPOConfig(), {name.replace("__", "."): value for name, value in flags.items()})
    models = models_of(calls, critic=critic)
    fits = hand_out([[["a"], ["b"]]], models, trains_policy=trains_policy(config, step=step), kl_weight=0.5)
    calls.clear()
    return update_models(fits, config)


@pytest.mark.parametrize(
    ("backend", "flags", "expected"),
    table("rl/update_order", "policy_and_critic_are_updated_in_turn_where_they_share_a_device"),
)
def test_policy_and_critic_are_updated_in_turn_where_they_share_a_device(backend, flags, expected, calls, monkeypatch):
    monkeypatch.setenv(cpu.BACKEND, backend)
    assert train(calls, **flags) == {"critic_loss": 1.0, "policy_loss": 1.0}
    assert calls == expected


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_policy_that_is_not_trained_yet_and_a_run_without_a_critic_wait_for_nobody(backend, calls, monkeypatch):
    monkeypatch.setenv(cpu.BACKEND, backend)
    assert train(calls, step=2, train__colocate_all=True, critic__freezing_steps=1) == {"critic_loss": 1.0}
    assert calls == IN_TURN[:2]
    calls.clear()
    assert train(calls, critic=False, train__colocate_all=True) == {"policy_loss": 1.0}
    assert calls == IN_TURN[2:]


def test_a_policy_that_is_not_trained_yet_gets_no_passes_and_models_with_as_many_ranks_share_theirs(calls):
    models, config = models_of(calls), dotted.replace(PPOConfig(), {"critic.freezing_steps": 1})
    # Two optimizer steps of a pass for each of two ranks.
    steps = [[["a"], ["b"]], [["c"], ["d"]]]
    given = [[["a"], ["c"]], [["b"], ["d"]]]
    for step, names in ((1, ["critic"]), (2, ["critic"]), (3, ["critic", "policy"])):
        fits = hand_out(steps, models, trains_policy=trains_policy(config, step=step), kl_weight=0.5)
        assert [(fit.group.name, fit.shares) for fit in fits] == [(name, given) for name in names]
    # It is stored once for both.
    assert calls == [f"critic gets {given}"] * 3
    # Four shares for a model of two ranks: consecutive ones become one.
    (fit,) = hand_out(
        [[["a"], ["b"], ["c"], ["d"]]], models_of(calls, critic=False), trains_policy=True, kl_weight=0.5
    )
    assert fit.shares == [[["a", "b"]], [["c", "d"]]]
