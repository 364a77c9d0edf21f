"""The reinforcement-learning loop: one controller that drives engines and model workers."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
from rich.console import Console

from lmm_r1.config import PPOConfig, checkpoint_folder
from lmm_r1.config.rewards import part_weights
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupSettings
from lmm_r1.host.checkpoint_folder import step_of, whole_checkpoints
from lmm_r1.host.checkpoint_writing import resume_point
from lmm_r1.host.checkpoints import warn_of_passed_over
from lmm_r1.host.openrlhf import Experience
from lmm_r1.host.openrlhf_engines import batch_vllm_engine_call
from lmm_r1.host.openrlhf_workers import BasePPOTrainer
from lmm_r1.host.optimizer import LossScaling
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.lifecycle.stopping import Progress, SaveSchedule, StopRequests
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.rl.critic_workers import shares_device_with_critic
from lmm_r1.rl.experiences import KitExperienceMaker
from lmm_r1.rl.groups import GroupFilter, GroupsUnderWay, counts, kept_tokens
from lmm_r1.rl.mismatch import Mismatch, Modality
from lmm_r1.rl.recorded_rollouts import RecordedRollouts
from lmm_r1.rl.rollout_source import MadeRollout, RolloutsAhead, RolloutsInTurn, RolloutSource, ages
from lmm_r1.rl.rollouts import KitSamplesGenerator, Rollout, told_by_workers
from lmm_r1.rl.workers import drop_references, feature_metrics, reference_file
from lmm_r1.scoring.scored_response import Moment

logger = logging.getLogger(__name__)

NEVER = float("inf")
# An idle worker answers at once.
_ANSWER_S = 120.0


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
        stops: StopRequests | None = None,
        trackers: Trackers | None = None,
        disagreeing: frozenset[Modality] = frozenset(),
    ) -> None:
        # OpenRLHF would make trackers of its own of these: they start a new run at a resume, and know TensorBoard and
        # wandb only. The workers, which get these arguments too, need no key.
        strategy.args.logger.wandb.key = strategy.args.logger.tensorboard_dir = None
        groups = (actor_group, critic_group, reward_group, reference_group)
        super().__init__(strategy, *groups, list(engines), tokenizer)
        # OpenRLHF divides by these. It saves whenever `_save` asks it to; never evaluating is -1.
        self.args.ckpt.save_steps = 1
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
        self.records = RecordedRollouts(folder=folder, count=config.logger.rollouts_per_step)
        self.trackers = trackers or Trackers()
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        self.generator = KitSamplesGenerator(
            self.args,
            engines,
            group_settings(config),
            part_weights=part_weights(config.reward),
            group_filter=GroupFilter.of(config),
            under_way=GroupsUnderWay(factor=config.rollout.oversample, most_held=config.rollout.oversample_max_held),
            leave_out=folder.leave_out,
        )
        self.total_steps = total_steps(config, num_rows=len(prompts.rows))
        self.stops = stops or StopRequests()
        self.schedule = SaveSchedule.of(config.ckpt)
        self.step = self.saved_step = 0
        # Of the prompts behind the last step that was made.
        self.position: Mapping[str, Any] = self._prompts_behind()
        self.source = self._rollout_source()
        # After which step the policy was what the reference is; 0 is the model of the start.
        self.reference_step = 0
        self._scaling: dict[str, LossScaling] = {}
        # While a step is made, how many updates the models' weights had before it.
        self.updates_before: list[int] | None = None

    def fit(self) -> int:
        """Train from the last saved step to the end of the data and return the number of steps.

        When the run ends before, what was learnt up to a whole step is saved first.
        """
        answers = ray.get(self.actor_model_group.async_run_method(method_name="shares_prefix"))
        self.experience_maker.share_prefix = all(answers)
        if not self._resume() and self.config.ds.load_in_4bit:
            # The engines have loaded the checkpoint, and the policy's weights are what is left of them in 4 bits.
            self.broadcast_to_vllm()
        self.position = self._prompts_behind()
        ray.get([engine.set_weight_version.remote(self.step) for engine in self.vllm_engines])
        self.stops.progress = self.progress
        self.folder.resume(self.step)
        # Those of the sessions before are in their steps' metrics.
        self._loss_scaling()
        self._make_up_evaluation()
        self._evaluate_first()
        states = self._states()
        self.source.start(self.step + 1)
        while True:
            began = time.perf_counter()
            try:
                self.stops.check()
                made = self.source.take(self.step + 1)
                if made is None:
                    break
                if not made.is_whole:
                    self._tell_of_the_end(made.rollout)
                    break
                with self.stops.held():
                    states = self._learn(made, began=began)
                # Its media go with it, before those of the next step come.
                del made
                if self.eval_rows and self.step % self.args.eval.steps == 0:
                    self.save_best_checkpoint(self._evaluate(self.step), self.step, dict(states))
            except (Exception, KeyboardInterrupt):
                self.source.close()
                self._save_before_stop(states)
                raise
        return self.step

    def _rollout_source(self) -> RolloutSource:
        train = self.config.train
        if not train.async_enable:
            return RolloutsInTurn(self._make)
        return RolloutsAhead(self._make, ahead=train.async_queue_size, across_updates=train.partial_rollout_enable)

    def _make(self, step: int) -> MadeRollout | None:
        """Return the rollout of a step; None where too few prompts are left for one."""
        batch = self.config.rollout.batch_size
        if not self.generator.can_fill(self.prompts, count=batch):
            return None
        began = time.perf_counter()
        moment, ahead = Moment(step=step, held_out=False), self.experience_maker.reference_ahead()
        rollout = self.generator.rollout(self.prompts, count=batch, moment=moment, ahead=ahead)
        return MadeRollout(
            rollout=rollout,
            is_whole=len(rollout.groups) == batch,
            position=self._prompts_behind(),
            began=began,
            ended=time.perf_counter(),
            solved=self.prompts.solved,
        )

    def _prompts_behind(self) -> dict[str, Any]:
        """Return the place in the prompts behind what was generated, with those that were begun and are not finished."""
        return {**self.prompts.state_dict(), **self.generator.under_way.state_dict()}

    def _learn(self, made: MadeRollout, *, began: float) -> dict[str, Any]:
        """Make a step of a rollout, record it, save it where that is due, and return what is saved beside it.

        Args:
            began: when the step was, which waits for its rollout.
        """
        rollout, taken = made.rollout, time.perf_counter()
        self.experience_maker.begin(rollout)
        self.updates_before = self._updates()
        status, self.step = self.train_step(rollout.experiences, self.step)
        self.updates_before = None
        self.position = made.position
        self._refresh_reference()
        now = time.perf_counter()
        status["timing/generation"] = made.ended - made.began
        status["timing/step_total"] = now - began
        if made.solved is not None:
            status["prompts_solved"] = made.solved
        if self.config.train.async_enable or self.config.rollout.oversample > 1:
            samples = [sample for group in rollout.groups for sample in group]
            status |= ages(samples, updates=self.step - 1)
        if self.config.rollout.oversample > 1:
            status["rollout/held_over_groups"] = rollout.held_over
            status["rollout/kept_tokens"] = kept_tokens(samples, updates=self.step - 1)
        if isinstance(self.source, RolloutsAhead):
            status["timing/trainer_waits"] = self.source.take_waited()
            status["timing/engines_wait"] = made.waited_s
            spans = {"generation": (made.began, made.ended), "update": (taken, now)}
            status |= self.folder.spans(spans, now=now)
        self._record(self.step, status, rollout)
        states = self._states()
        if self.schedule.is_due(self.step):
            self._save(states)
        return states

    def broadcast_to_vllm(self) -> None:
        """Send the policy's weights to the engines, whose responses have ended by then, or are held up for it."""
        with self.source.replacing():
            if not self.config.train.partial_rollout_enable:
                super().broadcast_to_vllm()
                return
            batch_vllm_engine_call(self.vllm_engines, "pause_generation")
            super().broadcast_to_vllm()
            # Not where it fails: what would go on then, would with weights of which some are new.
            batch_vllm_engine_call(self.vllm_engines, "resume_generation")

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
        self._hand_out(passes.steps, step=global_step)
        handed_out = time.perf_counter()
        self._computed_tokens()
        with told_by_workers(before=f"step {global_step + 1}: "):
            status = self.ppo_train(global_step)
        status |= self._loss_scaling()
        trained = time.perf_counter()
        tokens: dict[str, float] = {
            "tokens/update_unique": passes.unique_tokens * self.args.train.max_epochs,
            "tokens/update_computed": self._computed_tokens(),
        }
        if self.config.ds.image_cache_gib:
            models = {"policy": self.actor_model_group, "reference": self.reference_model_group}
            tokens |= feature_metrics({**models, "critic": self.critic_model_group})
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

    def _trains_policy(self, step: int) -> bool:
        """Say whether the policy is trained in a step, counted from 0: the critic may learn alone before."""
        return step > self.args.critic.freezing_steps

    def _refresh_reference(self) -> None:
        """Give the reference the policy's weights where `--ref.refresh_steps` says so."""
        every = self.config.ref.refresh_steps
        if not every or self.step % every:
            return
        folder, before = checkpoint_folder(self.config), self.reference_step
        file = str(reference_file(folder, self.step))
        ray.get(self.actor_model_group.async_run_method(method_name="write_reference", file=file))
        self._load_reference(self.step)
        saved = [] if self.config.ckpt.disable_ds else whole_checkpoints(folder / "_actor").values()
        # The step before is saved yet where this one fails from here on.
        drop_references(folder, steps=[checkpoint.step for checkpoint in saved], kept=(before, self.step))

    def _load_reference(self, step: int) -> None:
        """Let the reference be the policy as it was after a step, whose weights are in a file."""
        assert self.reference_model_group is not None, "refused by config.checks"
        file = str(reference_file(checkpoint_folder(self.config), step))
        with told_by_workers():
            ray.get(self.reference_model_group.async_run_method(method_name="load_reference", file=file))
        self.reference_step = step

    def _hand_out(self, steps: Sequence[list[Experience]], *, step: int) -> None:
        """Give every worker that is to be trained its passes, one optimizer step after the other.

        A policy that is not trained gets none: its workers would keep them, and train on them in a later step.
        """
        policy = self.actor_model_group if self._trains_policy(step) else None
        groups = [group for group in (policy, self.critic_model_group) if group is not None]
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

    def _loss_scaling(self) -> dict[str, float]:
        """Return the metrics of loss scaling since this was called last, of policy and critic; none without fp16."""
        if self.config.ds.param_dtype != "fp16":
            return {}
        metrics: dict[str, float] = {}
        for prefix, group in (("", self.actor_model_group), ("critic_", self.critic_model_group)):
            if group is not None:
                # The same on all ranks, which leave out the same updates.
                now = ray.get(group.async_run_method(method_name="loss_scaling"))[0]
                metrics |= now.metrics(self._scaling.get(prefix), prefix=prefix)
                self._scaling[prefix] = now
        return metrics

    def _computed_tokens(self) -> int:
        """Return how many tokens the policy's workers have computed since they were asked last."""
        counts = ray.get(self.actor_model_group.async_run_method(method_name="take_computed_tokens"))
        # Workers that share rows count all tokens of each.
        return sum(counts[:: self.actor_model_group.duplicate_actors])

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Update critic and policy: one after the other where they share GPUs or cores, else at the same time.

        Each gives back, when it is done, the memory that PyTorch holds for it; two at a time would both need theirs.
        """
        if self.critic_model_group is None or self.args.ds.enable_sleep or not shares_device_with_critic(self.config):
            return super().ppo_train(global_steps)
        status: dict[str, Any] = {}
        for result in ray.get(self.critic_model_group.async_run_method(method_name="fit")):
            status.update(result)
        if self._trains_policy(global_steps):
            for result in ray.get(
                self.actor_model_group.async_run_method(method_name="fit", kl_ctl=self.kl_ctl.value)
            ):
                status.update(result)
        return status

    def choose_checkpoint(self) -> None:
        """Settle, before any model is loaded, which step all of them go on from: the newest that each has whole."""
        # A universal checkpoint has a file of its own that names it.
        if not self.config.ckpt.load_enable or self.config.ds.use_universal_ckpt:
            return
        point = resume_point(model_folders(self.config))
        warn_of_passed_over(point)
        # The workers get both with the strategy.
        self.strategy.resume_tag = point.tag
        self.args.ckpt.load_enable = point.tag is not None

    def save_logs_and_checkpoints(
        self,
        global_step: int,
        logs_dict: dict[str, Any] | None = None,
        client_states: dict[str, Any] | None = None,
    ) -> None:
        """Save the step; older ones go once every model is saved."""
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        self._settle(f"global_step{global_step}")

    def save_best_checkpoint(
        self, eval_metrics: dict[str, float], global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        """Save the step where its evaluation is the best; the one before goes once every model is saved."""
        before = self.best_eval_metric_value
        super().save_best_checkpoint(eval_metrics, global_step, client_states)
        if self.best_eval_metric_value > before:
            self._settle(f"best_global_step{global_step}")

    def _settle(self, tag: str) -> None:
        """Let what all models have saved be the newest; until then each model has an earlier step that all have."""
        groups = [group for group in (self.actor_model_group, self.critic_model_group) if group is not None]
        ray.get([ref for group in groups for ref in group.async_run_method(method_name="settle_checkpoint", tag=tag)])

    def _resume(self) -> bool:
        """Find the step to go on from, and say whether there is one; then restore data position and engines, too."""
        if not self.config.ckpt.load_enable:
            return False
        states = ray.get(self.actor_model_group.async_run_method(method_name="get_checkpoint_states"))[0]
        if not states:
            return False
        self.restore_best_checkpoint_state(states)
        self.prompts.load_state_dict(states["data_loader_state_dict"])
        self.generator.under_way.load_state_dict(states["data_loader_state_dict"])
        if self.args.algo.kl.target and "kl_coef" in states:
            self.kl_ctl.value = states["kl_coef"]
        self.step = self.saved_step = states["global_step"]
        if self.config.ref.refresh_steps and (refreshed := states.get("reference_step")):
            self._load_reference(refreshed)
        self.broadcast_to_vllm()
        self.console.print(f"{self.folder.name} resumed at step {self.step}/{self.total_steps}")
        return True

    def _make_up_evaluation(self) -> None:
        """Evaluate the step that a run goes on from, where it was killed between that step's save and its evaluation."""
        if not self.eval_rows or self.step == 0 or self.step % self.args.eval.steps:
            return
        logs = self.folder.logged(self.step, prefix="eval_") or self._evaluate(self.step)
        self.save_best_checkpoint(logs, self.step, self._states())

    def _evaluate_first(self) -> None:
        """Evaluate the model that the run starts from, where that is asked for and was not done before a kill."""
        asked = self.step == 0 and self.config.eval.before_training
        if asked and not self.folder.logged(0, prefix="eval_"):
            self._evaluate(0)

    def _tell_of_the_end(self, rollout: Rollout) -> None:
        """Say that the prompts are used up before a step is full; raises UserError where none was made at all."""
        why = self.generator.why_dropped(rollout.dropped, overlong=rollout.overlong, refused=rollout.refused)
        made, batch = len(rollout.groups), self.config.rollout.batch_size
        said = f"the prompts are used up with {made} of the {batch} groups of step {self.step + 1}: {why}"
        if self.step == 0:
            raise UserError(f"no step could be made: {said}")
        self.console.print(f"{self.folder.name} ends with step {self.step}: {said}")

    def _states(self) -> dict[str, Any]:
        return {
            "global_step": self.step,
            "data_loader_state_dict": dict(self.position),
            # Of an adaptive KL penalty, which goes on with the weight that it has reached.
            "kl_coef": self.kl_ctl.value,
            "reference_step": self.reference_step,
        }

    def _save(self, states: dict[str, Any]) -> None:
        """Save the policy and the critic as they are after the step that `states` are about."""
        # The copy keeps OpenRLHF's own entries (best metric and so on) out of ours.
        self.save_logs_and_checkpoints(self.step, {}, dict(states))
        self.schedule.note_saved()
        if not self.config.ckpt.disable_ds:
            self.saved_step = self.step

    def _save_before_stop(self, states: dict[str, Any]) -> None:
        """Save the last whole step, unless it is saved, or weights have been changed since."""
        if self.step in (0, self.saved_step) or self.config.ckpt.disable_ds:
            return
        try:
            with self.stops.held():
                if self.updates_before is None or self.updates_before == self._updates():
                    self._save(states)
        except ray.exceptions.RayError as error:
            # What ended the run may have ended the workers as well, and is what the run ends with.
            logger.warning("step %d could not be saved (%s)", self.step, str(error).splitlines()[0])

    def _updates(self) -> list[int]:
        """Return how many updates the weights of policy and critic have had, as every worker counts them."""
        groups = [group for group in (self.actor_model_group, self.critic_model_group) if group is not None]
        refs = [ref for group in groups for ref in group.async_run_method(method_name="updates_made")]
        # Those that wait for one that is lost answer nobody; it is asked between steps, when all others are idle.
        return ray.get(refs, timeout=_ANSWER_S)

    def progress(self) -> Progress:
        """Return how far the run has come, and what of it is on disk."""
        ckpt = self.config.ckpt
        return Progress(
            name=self.folder.name,
            step=self.step,
            total=self.total_steps,
            saved=self.saved_step or None,
            checkpoints=checkpoint_folder(self.config),
            disabled=ckpt.disable_ds,
            overwrite=ckpt.overwrite,
        )

    def _record(self, step: int, status: dict[str, Any], rollout: Rollout) -> None:
        """Write the step's metrics and some of its rollouts, and print one line."""
        groups = rollout.rewarded()
        samples = [sample for group in groups for sample in group]
        rewards = [sample.scored for sample in samples]
        parts = {name: fmean(reward.parts[name] for reward in rewards) for name in rewards[0].parts}
        metrics = {
            **{name: value for name, value in status.items() if name != "generated_samples"},
            **parts,
            "reward": fmean(reward.reward for reward in rewards),
            "truncated_rate": fmean(sample.truncated for sample in samples),
            "overlong_prompts": rollout.overlong,
            "filtered_groups": rollout.filtered,
            **{f"filtered_groups/{reason}": count for reason, count in counts(rollout.dropped).items()},
            "media_bytes": rollout.media_bytes,
            **({} if rollout.guesses is None else rollout.guesses.metrics()),
            **{part.metric: part.weight for part in rollout.part_weights},
            **({"reference_step": self.reference_step} if self.config.ref.refresh_steps else {}),
        }
        if rollout.greedy:
            metrics["greedy_reward"] = fmean(sample.scored.reward for sample in rollout.greedy)
        self.folder.metrics(step, metrics)
        shown_rollouts = self.records.write(step, groups)
        self.records.write_dropped(step, rollout)
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
            + self.folder.time_left(step, total=self.total_steps)
            + (f"  ({rollout.overlong} overlong prompts skipped)" if rollout.overlong else "")
            + (f"  ({rollout.refused} prompts that cannot be encoded left out)" if rollout.refused else "")
            + (f"  ({rollout.filtered} groups filtered)" if rollout.filtered else "")
            + (f"  ({status['skipped_updates']:.0f} updates skipped)" if status.get("skipped_updates") else "")
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return and log pass@1 and pass@k per data source of `--eval.dataset`, and record some of the responses."""
        count = self.config.eval.n_samples_per_prompt
        found = self.generator.evaluate(
            self.eval_rows,
            temperature=self.config.eval.temperature,
            n_samples=count,
            moment=Moment(step=step, held_out=True),
        )
        groups = [group for group in found if group]  # none of a prompt that is too long
        by_source: dict[str, list[list[float]]] = defaultdict(list)
        for group in groups:
            by_source[group[0].row.datasource].append([sample.scored.score for sample in group])
        logs = {}
        for source, scores in by_source.items():
            logs[f"eval_{source}_pass1"] = fmean(fmean(group) for group in scores)
            logs[f"eval_{source}_pass{count}"] = fmean(max(group) for group in scores)
        self.trackers.log_eval(step, logs)
        self.folder.metrics(step, logs)
        self.records.write(step, groups, held_out=True)
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
        sampling=SamplingSettings(
            n_samples=config.rollout.n_samples_per_prompt,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_new_tokens=config.rollout.max_new_tokens,
            top_k=config.rollout.top_k,
        ),
        max_len=config.data.max_len,
        logprobs=True,
        ignore_eos=config.rollout.ignore_eos,
        overlong_prompts=config.data.overlong_prompts,
        bad_rows=config.data.bad_rows,
        media=True,
        branches=config.agent.branches,
        pictures=config.train.plays and config.logger.rollouts_per_step > 0,
        greedy=config.algo.advantage.estimator == "remax",
    )


def model_folders(config: PPOConfig) -> list[Path]:
    """Return the folders of the checkpoints of each model that is trained."""
    names = ["_actor", "_critic"] if config.critic.model_name_or_path else ["_actor"]
    return [checkpoint_folder(config) / name for name in names]


def saved_step(config: PPOConfig) -> int:
    """Return the step that a run would go on from now; 0 where nothing is saved."""
    tag = resume_point(model_folders(config)).tag
    return 0 if tag is None else step_of(tag)


def total_steps(config: PPOConfig, *, num_rows: int) -> int:
    """Return the rollout steps of a run in which no prompt is dropped."""
    return num_rows // config.rollout.batch_size * config.train.num_episodes


def optimizer_steps(config: PPOConfig, *, num_rows: int, waits: int = 0) -> int:
    """Return the optimizer steps of a model that learns after so many steps, over which its learning rate is scheduled."""
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    per_step = samples // config.train.batch_size * config.train.max_epochs
    return max(0, total_steps(config, num_rows=num_rows) - waits) * per_step
