"""Parts of an RL step: experiences, passes of a policy loss, workers and trainers without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from helpers.samples import generated_sample
from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import MediaRef, Sample
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.rl import loop
from lmm_r1.rl.batching import PassLimits, UpdatePasses, forward_plan, pass_limits, pass_of, update_passes
from lmm_r1.rl.experiences import add_advantages, add_model_outputs, experience_of
from lmm_r1.rl.loop import RLRun
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.model_groups import Models
from lmm_r1.rl.rollouts import MadeRollout, Rollout
from lmm_r1.rl.run import prompt_stream


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


def sample(
    prompt: Sequence[int], response: Sequence[int], *, media: MediaRef | None = None, reward: float = 0.0
) -> Experience:
    """One sample, of which the response is learnt."""
    return experience_of(generated_sample(prompt, response, media=media, reward=reward), max_len=10_000)


def group(prompt: Sequence[int], lengths: Sequence[int], *, media: MediaRef | None = None) -> list[Experience]:
    """Samples of one prompt with responses of these lengths, each of a token of its own."""
    return [sample(prompt, [50 + place] * length, media=media) for place, length in enumerate(lengths)]


def trained(experience: Experience) -> Experience:
    """The experience with what models and estimator add before an update."""
    shape = experience.action_mask.shape
    experience.action_log_probs = -torch.rand(shape)
    experience.returns = torch.rand(shape)
    experience.advantages = torch.rand(shape)
    return experience


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
        self.locations: Sequence[str] = ()
        self.greedy: Sequence[Sample] = ()

    def limits(self, settings: Any) -> PassLimits:
        return pass_limits(self.config, settings, share_prefix=self.share_prefix)

    def forward_passes(self, samples: list[Experience]) -> list[Experience]:
        plan = forward_plan(numbered(samples), ranks=self.models.ranks, limits=self.limits(self.config.rollout))
        return [pass_of([samples[place] for place in batch]) for batch in plan]

    def with_outputs(self, samples: list[Experience]) -> list[Experience]:
        limits = self.limits(self.config.rollout)
        add_model_outputs(numbered(samples), self.models, self.config, limits=limits, mismatch=self.mismatch)
        return samples

    def with_advantages(self, passes: list[Experience]) -> list[Experience]:
        greedy = [experience_of(sample, max_len=self.config.data.max_len) for sample in self.greedy]
        given = {"kl_weight": self.kl_weight, "locations": self.locations, "greedy": greedy}
        add_advantages(passes, self.config, **given)
        return passes

    def update_passes(self, passes: Sequence[Experience], *, step: int) -> UpdatePasses:
        """Return the passes of the update.

        Args:
            step: counted from 0.
        """
        return update_passes(
            samples_of(passes),
            batch_size=self.config.train.batch_size,
            ranks=self.models.ranks if self.models.all else 1,
            limits=self.limits(self.config.train),
            seed=f"{self.config.train.seed}-{step}",
        )


Pass = dict[str, torch.Tensor]


def random_pass(*lengths: int, seed: int = 0, width: int = 6) -> Pass:
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
        "action_mask": mask,
        "rollout_log_probs": engine,
    }


Run = TypeVar("Run", bound=RLRun)


class AnsweringPolicy:
    """The policy's workers, which answer at once."""

    duplicate_actors = 1
    answers = {"shares_prefix": True, "get_checkpoint_states": {}, "updates_made": 0}

    def __init__(self) -> None:
        self.broadcast: Callable[[], None] = lambda: None

    def async_run_method(self, method_name: str) -> list[Any]:
        return [self.broadcast() if method_name == "broadcast_to_vllm" else self.answers[method_name]]


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


def play_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run's `train_step(rollout, step=...)` take the place of training."""

    def train_on(learner: Any, rollout: Rollout, *, step: int) -> dict[str, float]:
        return learner.run.train_step(rollout, step=step)

    monkeypatch.setattr(loop, "train_on", train_on)


def samples_of(batches: Sequence[Experience]) -> list[Experience]:
    """The samples of batches by their places, each as a batch of one without padding."""
    found = {}
    for batch in batches:
        for row, place in enumerate(batch.index):
            length = int(batch.attention_mask[row].sum())
            parts: dict[str, Any] = {"index": [place]}
            for name, value in vars(batch).items():
                if isinstance(value, torch.Tensor):
                    parts[name] = value[row : row + 1]
                    if Experience.is_step_tensor_field(name):
                        parts[name] = parts[name][:, : length - batch.sequences.shape[1] + value.shape[1]]
                elif isinstance(value, dict):
                    parts[name] = {key: values[row : row + 1] for key, values in value.items()}
                elif name == "mm_train_inputs" and value:
                    parts[name] = [value[row]]
            found[place] = Experience(**parts)
    return [found[place] for place in sorted(found)]


def numbered(samples: Sequence[Experience]) -> Sequence[Experience]:
    """Let samples know their places in the rollout."""
    for place, sample in enumerate(samples):
        sample.index = [place]
    return samples
