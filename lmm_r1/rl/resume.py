"""What an RL run saves of its models, and how it resumes: regular and best checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from lmm_r1.config import PPOConfig, checkpoint_folder
from lmm_r1.host.checkpoint_folder import resume_point
from lmm_r1.host.checkpoints import warn_of_passed_over
from lmm_r1.host.strategy import KitStrategy, make_strategy
from lmm_r1.rl.model_groups import Models, ask
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor, TrainedWorker

NEVER_BEST = "none"
"""The value of `--ckpt.best_metric_key` with which no checkpoint is saved as the best."""


def workers_strategy(config: PPOConfig) -> KitStrategy:
    """Return the strategy of the workers of all models, which names the checkpoint that they resume from.

    It is the newest checkpoint that is complete for each model.
    """
    strategy = make_strategy(config)
    if config.ckpt.load_enable:
        names = ["_actor", "_critic"] if config.critic.model_name_or_path else ["_actor"]
        point = resume_point([checkpoint_folder(config) / name for name in names])
        warn_of_passed_over(point)
        strategy.resume_from(point.tag)
    return strategy


@dataclass(kw_only=True)
class BestEvaluation:
    """The best evaluation of a run so far, by one of its metrics."""

    key: str
    """The metric's name; empty until the first evaluation, which then chooses it, or `none`."""
    value: float = float("-inf")
    latest: float | None = None
    """The metric's last value."""

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Take in the metrics of an evaluation, and say whether it is the best."""
        if self.key == NEVER_BEST:
            return False
        if not self.key:
            self.key = next((name for name in sorted(metrics) if name.endswith("_pass1")), "")
        if self.key not in metrics:
            return False
        self.latest = metrics[self.key]
        if not self.latest > self.value:
            return False
        self.value = self.latest
        return True

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that `restore` reads."""
        return {
            "best_eval_metric_key": self.key,
            "best_eval_metric_value": self.value,
            "latest_eval_metric_value": self.latest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the entries of a checkpoint."""
        self.key = state.get("best_eval_metric_key") or self.key
        value = state.get("best_eval_metric_value")
        if value is not None:
            self.value, self.latest = value, state.get("latest_eval_metric_value", value)


@dataclass(kw_only=True)
class Checkpoints:
    """Saves the policy and the critic of a run; an earlier checkpoint is deleted only after both are saved."""

    config: PPOConfig
    models: Models
    best: BestEvaluation

    def save(self, step: int, states: Mapping[str, Any]) -> None:
        """Save the models after a step.

        Args:
            states: what else the run needs to resume.
        """
        self._save(f"global_step{step}", {**states, **self.best.state()}, value=self.best.latest)

    def save_if_best(self, metrics: Mapping[str, float], step: int, states: Mapping[str, Any]) -> None:
        """Save the models after a step as the best, if the metrics of its evaluation are."""
        if self.best.improves(metrics):
            states = {**states, **self.best.state(), "checkpoint_metric_key": self.best.key}
            self._save(f"best_global_step{step}", states, value=self.best.value)

    def _save(self, tag: str, states: Mapping[str, Any], *, value: float | None) -> None:
        given = {"tag": tag, "metric_value": value, "metric_key": self.best.key or None}
        refs = self.models.policy.start(KitPolicyActor.save_checkpoint, client_states=dict(states), **given)
        for critic in self.models.trained[1:]:
            refs += critic.start(KitCriticActor.save_checkpoint, **given)
        ray.get(refs)
        ray.get([ref for group in self.models.trained for ref in group.start(TrainedWorker.settle_checkpoint, tag)])

    def loaded_states(self) -> dict[str, Any]:
        """Return what the checkpoint says that the policy's workers have loaded; empty if they loaded none."""
        if not self.config.ckpt.load_enable:
            return {}
        return ask(self.models.policy, KitPolicyActor.get_checkpoint_states)[0] or {}
