"""The reinforcement-learning loop: one controller that drives engines and model workers."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from rich.console import Console

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.prompt_stream import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.rollout.group import GroupSettings
from lmm_r1.trainer.experience_maker import KitExperienceMaker
from lmm_r1.trainer.mismatch import Mismatch, Modality
from lmm_r1.trainer.run_folder import RunFolder
from lmm_r1.trainer.samples import KitSamplesGenerator, Rollout
from lmm_r1.trainer.strategy import KitStrategy
from lmm_r1.trainer.trackers import Generation, Trackers
from lmm_r1.trainer.trackers.tracker import make_generation

logger = logging.getLogger(__name__)

NEVER = float("inf")


class KitPPOTrainer(BasePPOTrainer):
    """OpenRLHF's step (experiences, update, weight sync) in a loop that can be stopped and taken up at any step."""

    def __init__(
        self,
        config: PPOConfig,
        strategy: KitStrategy,
        *,
        actor_group: Any,
        critic_group: Any | None,
        reward_group: Any | None,
        reference_group: Any | None,
        engines: Sequence[Any],
        tokenizer: Any,
        prompts: PromptStream,
        eval_rows: Sequence[Row],
        folder: RunFolder,
        trackers: Trackers | None = None,
        disagreeing: frozenset[Modality] = frozenset(),
    ) -> None:
        # OpenRLHF would make trackers of its own of these: they start a new run at a resume, and know TensorBoard and
        # wandb only. The workers, which get these arguments too, need no key.
        strategy.args.logger.wandb.key = strategy.args.logger.tensorboard_dir = None
        groups = (actor_group, critic_group, reward_group, reference_group)
        super().__init__(strategy, *groups, list(engines), tokenizer)
        # OpenRLHF divides by these: -1 stands for never.
        self.args.ckpt.save_steps = config.ckpt.save_steps if config.ckpt.save_steps > 0 else NEVER
        self.args.eval.steps = config.eval.steps if config.eval.steps > 0 else NEVER
        self.config = config
        self.experience_maker = KitExperienceMaker(
            config,
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self.reference_model_group,
            self.kl_ctl,
            strategy,
            tokenizer,
        )
        self.experience_maker.mismatch = Mismatch(config, unchecked=disagreeing)
        self.prompts = prompts
        self.eval_rows = eval_rows
        self.folder = folder
        self.trackers = trackers or Trackers()
        self.console = Console(highlight=False)
        self.generator = KitSamplesGenerator(self.args, engines, group_settings(config))
        self.total_steps = total_steps(config, num_rows=len(prompts.rows))
        self.saved_step = 0

    def fit(self) -> int:
        """Train from the last saved step to the end of the data and return the number of steps.

        When a step fails because of the outside world, what was learnt before it is saved first.
        """
        answers = ray.get(self.actor_model_group.async_run_method(method_name="shares_prefix"))
        self.experience_maker.share_prefix = all(answers)
        step = self._resume()
        batch = self.config.rollout.batch_size
        states = self._states(step)
        while self.prompts.has(batch):
            began = time.perf_counter()
            try:
                rollout = self.generator.rollout(self.prompts, count=batch)
                if len(rollout.groups) < batch:
                    continue
                generated = time.perf_counter()
                status, step = self.train_step(rollout.experiences, step)
            except UserError:
                self._save_before_stop(states)
                raise
            status["timing/generation"] = generated - began
            status["timing/step_total"] = time.perf_counter() - began
            self._record(step, status, rollout)
            states = self._states(step)
            # The copy keeps OpenRLHF's own entries (best metric and so on) out of ours.
            self.save_logs_and_checkpoints(step, status, dict(states))
            if step % self.args.ckpt.save_steps == 0:
                self.saved_step = step
            if self.eval_rows and step % self.args.eval.steps == 0:
                self.save_best_checkpoint(self._evaluate(step), step, dict(states))
        return step

    def train_step(self, rollout_samples: list[Experience], global_step: int) -> tuple[dict[str, Any], int]:
        """Make one step from its samples, as OpenRLHF does, with batches that keep groups whole; return its metrics."""
        began = time.perf_counter()
        experiences = self.experience_maker.make_experience_batch(rollout_samples)
        made = time.perf_counter()
        note_rewards(rollout_samples, experiences)
        rollout_stats = self._compute_rollout_stats(experiences)
        text = self.tokenizer.decode(experiences[0].sequences[0], skip_special_tokens=True)
        example = [text, experiences[0].info["reward"][0].item()]
        passes = self.experience_maker.update_passes(experiences, step=global_step)
        self._hand_out(passes.steps)
        handed_out = time.perf_counter()
        self._computed_tokens()
        status = self.ppo_train(global_step)
        trained = time.perf_counter()
        tokens = {
            "tokens/update_unique": passes.unique_tokens * self.args.train.max_epochs,
            "tokens/update_computed": self._computed_tokens(),
        }
        mismatch = self._mismatch()
        self.broadcast_to_vllm()
        if "kl" in status:
            self.kl_ctl.update(status["kl"], len(rollout_samples))
        timing = {
            "timing/make_experience": made - began,
            "timing/hand_out": handed_out - made,
            "timing/ppo_train": trained - handed_out,
            "timing/broadcast": time.perf_counter() - trained,
        }
        metrics = {**status, **tokens, **mismatch, **timing, **rollout_stats}
        return {**metrics, "generated_samples": example}, global_step + 1

    def _hand_out(self, steps: Sequence[list[Experience]]) -> None:
        """Give every worker of the policy and of the critic its passes, one optimizer step after the other."""
        groups = [group for group in (self.actor_model_group, self.critic_model_group) if group is not None]
        ray.get(
            [
                ref
                for passes in steps
                for group in groups
                for ref in group.async_run_method_batch(method_name="append", experience=passes)
            ]
        )

    def _mismatch(self) -> dict[str, float]:
        """Return how far engine and policy were apart in this step, over the samples of all workers."""
        mismatch = self.experience_maker.mismatch
        parts = ray.get(self.actor_model_group.async_run_method(method_name="take_gaps"))
        # Workers that share rows know all log-probs of each.
        mismatch.add(() if mismatch.measured else parts[:: self.actor_model_group.duplicate_actors])
        return mismatch.take_metrics()

    def _computed_tokens(self) -> int:
        """Return how many tokens the policy's workers have computed since they were asked last."""
        counts = ray.get(self.actor_model_group.async_run_method(method_name="take_computed_tokens"))
        # Workers that share rows count all tokens of each.
        return sum(counts[:: self.actor_model_group.duplicate_actors])

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Update critic and policy; where there is no CUDA one after the other: together they share the cores badly."""
        if cpu.has_cuda() or self.critic_model_group is None or self.args.ds.enable_sleep:
            return super().ppo_train(global_steps)
        status: dict[str, Any] = {}
        for result in ray.get(self.critic_model_group.async_run_method(method_name="fit")):
            status.update(result)
        if global_steps > self.args.critic.freezing_steps:
            for result in ray.get(
                self.actor_model_group.async_run_method(method_name="fit", kl_ctl=self.kl_ctl.value)
            ):
                status.update(result)
        return status

    def _resume(self) -> int:
        """Return the step to go on from; on a resume also restore the data position and the engines' weights."""
        if not self.config.ckpt.load_enable:
            return 0
        states = ray.get(self.actor_model_group.async_run_method(method_name="get_checkpoint_states"))[0]
        if not states:
            return 0
        self.restore_best_checkpoint_state(states)
        self.prompts.load_state_dict(states["data_loader_state_dict"])
        self.saved_step = states["global_step"]
        self.broadcast_to_vllm()
        self.console.print(f"{self.folder.name} resumed at step {self.saved_step}/{self.total_steps}")
        self._tell_of_another_critic()
        return self.saved_step

    def _tell_of_another_critic(self) -> None:
        """Warn where the critic was saved at another step: a run that is killed may have saved one of the two."""
        if self.critic_model_group is None:
            return
        step = ray.get(self.critic_model_group.async_run_method(method_name="saved_step"))[0]
        if step != self.saved_step:
            found = "starts anew" if step is None else f"goes on from step {step}"
            logger.warning("the critic %s, and the policy from step %d", found, self.saved_step)

    def _states(self, step: int) -> dict[str, Any]:
        return {"global_step": step, "data_loader_state_dict": self.prompts.state_dict()}

    def _save_before_stop(self, states: dict[str, Any]) -> None:
        step = states["global_step"]
        if step == self.saved_step or self.config.ckpt.disable_ds:
            return
        tag = f"global_step{step}"
        refs = self.actor_model_group.async_run_method(method_name="save_checkpoint", tag=tag, client_states=states)
        if self.critic_model_group is not None:
            refs += self.critic_model_group.async_run_method(method_name="save_checkpoint", tag=tag)
        ray.get(refs)
        self.console.print(f"saved step {step}; the same command with --ckpt.load_enable goes on from there")

    def _record(self, step: int, status: dict[str, Any], rollout: Rollout) -> None:
        """Write the step's metrics and some of its rollouts, and print one line."""
        samples = [sample for group in rollout.groups for sample in group]
        for sample, experience in zip(samples, rollout.experiences, strict=True):
            if sample["reward"] is None:
                sample["reward"] = experience.info["reward"].item()
        parts = {name: fmean(sample["extra_logs"][name] for sample in samples) for name in samples[0]["extra_logs"]}
        metrics = {
            **{name: value for name, value in status.items() if name != "generated_samples"},
            **parts,
            "reward": fmean(sample["reward"] for sample in samples),
            "truncated_rate": fmean(sample["truncated"] for sample in samples),
            "overlong_prompts": rollout.overlong,
            "filtered_groups": rollout.filtered,
        }
        self.folder.metrics(step, metrics)
        shown_rollouts = self._record_rollouts(step, rollout)
        if step % self.config.logger.logging_steps == 0 or step == self.total_steps:
            self.trackers.log(step, metrics)
            if shown_rollouts:
                self.trackers.log_generations(step, shown_rollouts)
        # What went wrong in judging is worth a place in the line only where something did.
        shown = "  ".join(
            f"{name} {value:.3f}" for name, value in parts.items() if value or name not in ("timed_out", "ungradable")
        )
        self.console.print(
            f"{self.folder.name} step {step}/{self.total_steps}  reward {metrics['reward']:.3f}  {shown}  "
            f"length {metrics['rollout/response_length_mean']:.1f}  {metrics['timing/step_total']:.1f} s"
            + (f"  ({rollout.overlong} overlong prompts skipped)" if rollout.overlong else "")
        )

    def _record_rollouts(self, step: int, rollout: Rollout) -> list[Generation]:
        """Write and return `--logger.rollouts_per_step` samples, each of another group while there are enough groups."""
        shown = []
        count = self.config.logger.rollouts_per_step
        for index in range(min(count, sum(map(len, rollout.groups)))):
            group = rollout.groups[index % len(rollout.groups)]
            sample = group[index // len(rollout.groups)]
            start, end = sample["action_ranges"][0]
            record = {
                "step": step,
                "group": index % len(rollout.groups),
                "response": sample["response"],
                "label": sample["label"],
                "reward": sample["reward"],
                "scores": sample["extra_logs"],
                "response_tokens": end - start,
                "truncated": sample["truncated"],
            }
            row: Row = sample["row"]
            written = self.folder.rollout(record, messages=row.messages, location=row.location)
            shown.append(make_generation(record, messages=written, folder=self.folder.path))
        return shown

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return and log pass@1 and pass@k per data source of `--eval.dataset`."""
        count = self.config.eval.n_samples_per_prompt
        groups = self.generator.evaluate(self.eval_rows, temperature=self.config.eval.temperature, n_samples=count)
        by_source: dict[str, list[list[float]]] = defaultdict(list)
        for group in groups:
            if group:
                by_source[group[0]["row"].datasource].append([sample["scores"] for sample in group])
        logs = {}
        for source, scores in by_source.items():
            logs[f"eval_{source}_pass1"] = fmean(fmean(group) for group in scores)
            logs[f"eval_{source}_pass{count}"] = fmean(max(group) for group in scores)
        self.trackers.log_eval(step, logs)
        self.folder.metrics(step, logs)
        self.console.print("  ".join(f"{name} {value:.3f}" for name, value in logs.items()))
        return logs


def note_rewards(samples: Sequence[Experience], experiences: Sequence[Experience]) -> None:
    """Write the rewards of a step's experiences, which a reward model may have given, into the rollout's samples."""
    for experience in experiences:
        for place, reward in zip(experience.index, experience.info["reward"], strict=True):
            samples[place].info["reward"] = reward[None]


def group_settings(config: PPOConfig) -> GroupSettings:
    """Return how the groups of a run are generated."""
    return GroupSettings(
        n_samples=config.rollout.n_samples_per_prompt,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_new_tokens=config.rollout.max_new_tokens,
        max_len=config.data.max_len,
        logprobs=True,
        ignore_eos=config.rollout.ignore_eos,
        overlong_prompts=config.data.overlong_prompts,
    )


def total_steps(config: PPOConfig, *, num_rows: int) -> int:
    """Return the rollout steps of a run in which no prompt is dropped."""
    return num_rows // config.rollout.batch_size * config.train.num_episodes


def optimizer_steps(config: PPOConfig, *, num_rows: int) -> int:
    """Return the optimizer steps of a run, over which the learning rate is scheduled."""
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    per_step = samples // config.train.batch_size * config.train.max_epochs
    return total_steps(config, num_rows=num_rows) * per_step
