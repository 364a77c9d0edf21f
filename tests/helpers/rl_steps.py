"""Parts of an RL step: samples, passes of a policy loss, workers and trainers without processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from helpers.samples import generated_sample

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import MediaRef, Sample
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.rl import loop
from lmm_r1.rl.loop import RLRun
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.model_groups import Models
from lmm_r1.rl.outputs import add_advantages, add_model_outputs
from lmm_r1.rl.rollouts import MadeRollout, Rollout
from lmm_r1.rl.run import prompt_stream
from lmm_r1.rl.samples import (
    Pass,
    PassLimits,
    TrainingSample,
    UpdatePasses,
    forward_passes,
    pass_limits,
    update_passes,
)


def small_run(*, prompts: int = 2, samples: int = 2, **changes: object) -> PPOConfig:
    """The settings of a run on one GPU of so many prompts a step, of whose samples it makes one update."""
    flags = {
        "actor.model_name_or_path": "model",
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "data.prompt_dataset": "rows.jsonl",
        "reward.remote_url": "http://127.0.0.1:5000/get_reward",
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": samples,
        "train.batch_size": prompts * samples,
    }
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(dotted.replace(PPOConfig(), flags | changes))


class Killed(Exception):
    """As a process that is killed: nothing is saved behind it."""


class KillableRun(RLRun):
    """Notes what it would save behind each step, and dies as a killed process does."""

    killed_in: int | None = None
    saved: list[dict[str, Any]]

    def _make_step(self, made: MadeRollout, *, began: float) -> dict[str, Any]:
        states = super()._make_step(made, began=began)
        self.saved.append(states)
        return states

    def _save_before_stop(self, states: dict[str, Any]) -> None:
        """Nothing: as after kill -9."""


_GROUPS = itertools.count()


def sample(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    media: MediaRef | None = None,
    reward: float = 0.0,
    group: int | None = None,
) -> TrainingSample:
    """One sample, of which the response is learnt; of a group of its own unless one is given."""
    made = generated_sample(prompt, response, media=media, reward=reward)
    return TrainingSample.of(made, max_len=10_000, group=next(_GROUPS) if group is None else group)


def group(prompt: Sequence[int], lengths: Sequence[int], *, media: MediaRef | None = None) -> list[TrainingSample]:
    """Samples of one prompt with responses of these lengths, each of a token of its own."""
    number = next(_GROUPS)
    return [sample(prompt, [50 + place] * length, media=media, group=number) for place, length in enumerate(lengths)]


def trained(one: TrainingSample) -> TrainingSample:
    """The sample with what models and estimator add before an update."""
    one.log_probs, one.returns, one.advantages = -torch.rand_like(one.turns.float()), *torch.rand(2, len(one.turns))
    return one


class PlayedGroup(WorkerGroup):
    """The workers of a model as objects of this process, which answer at once: `ray.get` has to return what it is given."""

    def __init__(self, *workers: Any, duplicates: int = 1) -> None:
        self._actor_handlers, self.duplicate_actors = list(workers), duplicates

    def start(self, method: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        return [getattr(worker, method.__name__)(*given, **named) for worker in self._actor_handlers]

    def hand_out(self, shares: Sequence[Any]) -> list[Any]:
        assert len(shares) == self.ranks
        return list(shares)

    def start_shares(self, method: Callable[..., Any], shares: Sequence[Any], **named: Any) -> list[Any]:
        return [
            getattr(worker, method.__name__)(shares[number // self.duplicate_actors], **named)
            for number, worker in enumerate(self._actor_handlers)
        ]


class StepParts:
    """The parts of a run's steps, each by itself."""

    def __init__(
        self, config: PPOConfig, *, share_prefix: bool = False, kl_weight: float = 0.1, **groups: Any
    ) -> None:
        self.config = config
        self.share_prefix = share_prefix
        self.kl_weight = kl_weight
        self.models = Models(**{"policy": None, **groups})
        self.mismatch = Mismatch(config)
        self.greedy: Sequence[Sample] = ()

    def limits(self, settings: Any) -> PassLimits:
        return pass_limits(self.config, settings, share_prefix=self.share_prefix)

    def forward_passes(self, samples: list[TrainingSample]) -> list[Pass]:
        """Return the passes of all ranks."""
        limits = self.limits(self.config.rollout)
        return list(chain.from_iterable(forward_passes(numbered(samples), ranks=self.models.ranks, limits=limits)))

    def with_outputs(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        limits = self.limits(self.config.rollout)
        add_model_outputs(numbered(samples), self.models, self.config, limits=limits, mismatch=self.mismatch)
        return samples

    def with_advantages(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        greedy = [TrainingSample.of(sample, max_len=self.config.data.max_len) for sample in self.greedy]
        add_advantages(samples, self.config, kl_weight=self.kl_weight, greedy=greedy)
        return samples

    def update_passes(self, samples: Sequence[TrainingSample], *, step: int) -> UpdatePasses:
        """Return the passes of the update.

        Args:
            step: counted from 0.
        """
        return update_passes(
            samples,
            batch_size=self.config.train.batch_size,
            ranks=self.models.ranks if self.models.all else 1,
            limits=self.limits(self.config.train),
            seed=f"{self.config.train.seed}-{step}",
        )


LossPass = dict[str, torch.Tensor]


def random_pass(*lengths: int, seed: int = 0, width: int = 6) -> LossPass:
    """Samples of so many loss tokens, of which not every second stands beside the next; ratios of 0.3 to 3."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(width, generator=generator)[:length]] = 1
    old = -2 * torch.rand(shape, generator=generator, dtype=torch.double)
    log_probs = (old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.double)).requires_grad_(True)
    engine = old + 0.3 * torch.randn(shape, generator=generator, dtype=torch.double)
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": torch.randn(shape, generator=generator, dtype=torch.double),
        "mask": mask,
        "engine_log_probs": engine,
    }


Run = TypeVar("Run", bound=RLRun)


class AnsweringPolicy(PlayedGroup):
    """The policy's workers, which answer at once."""

    answers = {"shares_prefix": True, "get_checkpoint_states": {}, "updates_made": 0}

    def __init__(self) -> None:
        super().__init__(object())
        self.broadcast: Callable[[], None] = lambda: None

    def start(self, method: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        return [self.broadcast() if method.__name__ == "broadcast_to_vllm" else self.answers[method.__name__]]


def without_workers(kind: type[Run], config: PPOConfig, rows: Sequence[Row], *, folder: Path) -> Run:
    """A run of prompts, whose policy's workers answer at once."""
    run = kind(
        config,
        models=Models(policy=AnsweringPolicy()),
        engines=[],
        prompts=prompt_stream(dotted.replace(config, {"train.seed": 1}), rows),
        eval_rows=[],
        folder=RunFolder(path=folder, name="rl", kind="rl"),
    )
    run.learner.run = run
    return run


class NotedEngine:
    """An engine that notes the names of what it is asked for and answers at once."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given, **named: self._note(name))


def play_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run's `train_step(rollout, step=...)` take the place of training."""

    def train_on(learner: Any, rollout: Rollout, *, step: int) -> dict[str, float]:
        return learner.run.train_step(rollout, step=step)

    monkeypatch.setattr(loop, "train_on", train_on)


def numbered(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Let samples know their places in the rollout, and number their groups in order."""
    groups: dict[int, int] = {}
    for place, one in enumerate(samples):
        one.place, one.group = place, groups.setdefault(one.group, len(groups))
    return list(samples)
