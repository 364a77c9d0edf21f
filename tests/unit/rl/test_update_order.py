"""When policy and critic are updated: in turn where they share cards or cores, at the same time where each has its own."""

import pytest
import ray
from helpers.tables import table

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.rl.model_groups import Models, hand_out, trains_policy, update_models

IN_TURN = ["critic starts", "critic is done", "policy starts", "policy is done"]
TOGETHER = ["critic starts", "policy starts", "critic is done", "policy is done"]


class PlayedGroup:
    """Workers of one model, two of them, that note when they are told to fit."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def async_run_method_batch(self, method_name: str, experience: list[str]) -> list[str]:
        assert method_name == "append"
        self.calls.append(f"{self.name} gets {' '.join(experience)}")
        return []

    def async_run_method(self, method_name: str, **given: float) -> list[str]:
        assert method_name == "fit"
        assert given == ({"kl_ctl": 0.5} if self.name == "policy" else {})
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
    return Models(policy=PlayedGroup("policy", calls), critic=PlayedGroup("critic", calls) if critic else None)


def train(calls: list[str], *, step: int = 1, critic: bool = True, **flags: object) -> dict[str, float]:
    config = dotted.replace(PPOConfig(), {name.replace("__", "."): value for name, value in flags.items()})
    models = models_of(calls, critic=critic)
    return update_models(models, config, trains_policy=trains_policy(config, step=step), kl_weight=0.5)


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


def test_a_policy_that_is_not_trained_yet_gets_no_passes_that_it_would_train_on_later(calls):
    models, config = models_of(calls), dotted.replace(PPOConfig(), {"critic.freezing_steps": 1})
    for step in range(3):
        groups = models.trained if trains_policy(config, step=step + 1) else models.trained[1:]
        hand_out([[f"a{step}"], [f"b{step}"]], groups)
    assert calls == [
        *("critic gets a0", "critic gets b0"),
        *("critic gets a1", "critic gets b1"),
        *("policy gets a2", "critic gets a2", "policy gets b2", "critic gets b2"),
    ]
