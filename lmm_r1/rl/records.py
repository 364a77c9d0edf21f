"""What a run records: a line of metrics for each step and each evaluation, and some of the rollouts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from lmm_r1.config import PPOConfig
from lmm_r1.config.rewards import format_prompt, reward_functions
from lmm_r1.data.messages import NO_PROMPT
from lmm_r1.data.sample import Sample
from lmm_r1.generation.media_store import fetch_pictures
from lmm_r1.records.rollouts import SampledResponse, append_rollout, keep_turns, shown_messages
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Generation, Trackers, make_generation
from lmm_r1.rl.filtering import counts
from lmm_r1.rl.rollouts import Rollout
from lmm_r1.rl.samples import TrainingSample

logger = logging.getLogger(__name__)

# Parts of a reward that the printed line shows only if they are not 0.
_FAILURES = ("timed_out", "ungradable")
# A first step in which fewer responses have the format that is paid is warned of.
LEAST_FORMAT = 0.05
_FEW_FORMATTED = (
    "%.1f %% of the first step's responses have the format that the reward pays (<think>, <answer>): ask for it with "
    "--data.system_prompt think, or in your own words; raise --rollout.max_new_tokens if responses are cut off before they "
    "answer; or teach the format first, with lmm-r1 train_sft"
)


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Writes a run's metrics and rollouts into its folder and its trackers, and prints a line for each step."""

    config: PPOConfig
    folder: RunFolder
    trackers: Trackers = field(default_factory=Trackers)
    total_steps: int
    console: Console

    def step(self, step: int, metrics: Mapping[str, float], rollout: Rollout) -> None:
        """Write the step's metrics and some of its rollouts, and print one line."""
        groups = rollout.rewarded()
        samples = [sample for group in groups for sample in group]
        parts = {name: fmean(sample.scored.parts[name] for sample in samples) for name in samples[0].scored.parts}
        line = {**metrics, **parts, **sample_metrics(samples, rollout)}
        self.folder.metrics(step, line)
        shown = self.rollouts(step, groups)
        for number, dropped in enumerate(rollout.dropped, start=len(groups)):
            for sample in dropped.samples:
                self._sample(sample, step=step, group=number, dropped=dropped.reason)
        # A server may pay the format; a function's part of this name may be anything.
        config, kept = self.config, parts.get("format", 1.0)
        if step == 1 and kept < LEAST_FORMAT and not config.train.plays:
            prompt = format_prompt(config)
            if prompt != NO_PROMPT and (prompt is not None or not reward_functions(config.reward)):
                logger.warning(_FEW_FORMATTED, 100 * kept)
        if step % self.config.logger.logging_steps == 0 or step == self.total_steps:
            self.trackers.log(step, line)
            if shown:
                self.trackers.log_generations(step, shown)
        self._print(step, line, parts, rollout)

    def evaluation(self, step: int, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
        """Write pass@1 and pass@k per data source and some of the responses of an evaluation; return the metrics."""
        metrics = evaluation_metrics(groups, count=self.config.eval.n_samples_per_prompt)
        self.trackers.log_eval(step, metrics)
        self.folder.metrics(step, metrics, held_out=True)
        self.rollouts(step, groups, held_out=True)
        self.console.print("  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
        return metrics

    def rollouts(self, step: int, groups: Sequence[Sequence[Sample]], *, held_out: bool = False) -> list[Generation]:
        """Write and return the samples of as many whole groups as are kept, and write their greedy responses."""
        samples = list(recorded_samples(groups, count=self.config.logger.rollouts_per_step))
        shown = [self._sample(sample, step=step, group=group, held_out=held_out) for group, sample in samples]
        greedy = {group: sample.greedy for group, sample in samples if sample.greedy is not None}
        for group, sample in greedy.items():
            self._sample(sample, step=step, group=group, greedy=True)
        return shown

    def _sample(self, sample: Sample, **noted: Any) -> Generation:
        """Write a sample and return it as trackers show it.

        Args:
            noted: further arguments of `SampledResponse.of`.
        """
        sample = fetch_pictures(sample)
        place = sample.row.location
        folder = self.folder.path
        said = () if sample.played is None else keep_turns(sample.played.said, folder=folder, location=place)
        response = SampledResponse.of(sample, said=said, **noted)
        written = append_rollout(folder, response, messages=shown_messages(sample), location=place)
        return make_generation(response, messages=written)

    def _print(self, step: int, line: Mapping[str, Any], parts: Mapping[str, float], rollout: Rollout) -> None:
        silent = line.get("groups_without_signal") == 1.0 and "actor_lr" not in line
        shown = "  ".join(f"{name} {value:.3f}" for name, value in parts.items() if value or name not in _FAILURES)
        self.console.print(
            f"{self.folder.name} step {step}/{self.total_steps}  reward {line['reward']:.3f}  {shown}  "
            f"length {line['response_length']:.1f}  {line['timing/step_total']:.1f} s"
            + self.folder.time_left(step, total=self.total_steps)
            + (f"  ({rollout.overlong} overlong prompts skipped)" if rollout.overlong else "")
            + (f"  ({rollout.refused} prompts that cannot be encoded left out)" if rollout.refused else "")
            + (f"  ({rollout.filtered} groups filtered)" if rollout.filtered else "")
            + (f"  ({line['skipped_updates']:.0f} updates skipped)" if line.get("skipped_updates") else "")
            + ("  (no update: all groups without signal)" if silent else "")
        )


def rollout_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the means of the values that samples log, the metrics of rewards with penalties, and the entropy."""
    rewards = torch.tensor([sample.logged["reward"] for sample in samples])
    log_probs = torch.cat(
        [sample.engine_log_probs[sample.loss_mask] for sample in samples if sample.engine_log_probs is not None]
    )
    return {name: fmean(sample.logged[name] for sample in samples) for name in samples[0].logged} | {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        # The mean of -log p over tokens that were sampled from p estimates the entropy without bias.
        "entropy": -log_probs.float().sum().item() / max(len(log_probs), 1),
        "rollout/num_samples": float(len(rewards)),
    }


def sample_metrics(samples: Sequence[Sample], rollout: Rollout) -> dict[str, float]:
    """Return the metrics of a rollout's samples as the engines gave them, and of what was left out."""
    metrics: dict[str, float] = {
        "reward": fmean(sample.scored.reward for sample in samples),
        "truncated_rate": fmean(sample.truncated for sample in samples),
        "overlong_prompts": rollout.overlong,
        "filtered_groups": rollout.filtered,
        **{f"filtered_groups/{reason}": count for reason, count in counts(rollout.dropped).items()},
        "media_bytes": rollout.media_bytes,
        **({} if rollout.guesses is None else rollout.guesses.metrics()),
        **{part.metric: part.weight for part in rollout.part_weights},
    }
    if rollout.greedy:
        metrics["greedy_reward"] = fmean(sample.scored.reward for sample in rollout.greedy)
    return metrics


def evaluation_metrics(groups: Sequence[Sequence[Sample]], *, count: int) -> dict[str, float]:
    """Return pass@1 and pass@`count` of groups of `count` samples, per data source."""
    by_source: dict[str, list[list[float]]] = defaultdict(list)
    for group in groups:
        by_source[group[0].row.datasource].append([sample.scored.score for sample in group])
    metrics = {}
    for source, scores in by_source.items():
        metrics[f"eval_{source}_pass1"] = fmean(fmean(group) for group in scores)
        metrics[f"eval_{source}_pass{count}"] = fmean(max(group) for group in scores)
    return metrics


def recorded_samples(groups: Sequence[Sequence[Sample]], *, count: int) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of as many whole groups as `count` has room for, but at least one, with their groups' places.

    Groups whose episodes have pictures come first, and within a group the episode that began first. A count of 0 yields
    nothing.
    """
    ordered = sorted(groups, key=lambda group: not any(sample.played and sample.played.pictures for sample in group))
    room = count
    for place, group in enumerate(ordered if count else []):
        if place and len(group) > room:
            return
        room -= len(group)
        for sample in sorted(group, key=lambda sample: sample.played.number if sample.played else 0):
            yield place, sample
