"""An RL run: its steps in order, with saving, resuming, evaluation, records and stopping around them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from rich.console import Console

from lmm_r1.config import PPOConfig, checkpoint_folder
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import in_worker
from lmm_r1.host.checkpoint_folder import resume_point
from lmm_r1.host.checkpoints import warn_of_passed_over
from lmm_r1.host.strategy import KitStrategy, make_strategy
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.rl.advantages import KLWeight
from lmm_r1.rl.filtering import why_dropped
from lmm_r1.rl.mismatch import Mismatch, Modality
from lmm_r1.rl.model_groups import Models, ask, scaling_metrics, updates_made
from lmm_r1.rl.records import Recorder
from lmm_r1.rl.rollouts import MadeRollout, Rollout, RolloutsAhead, ages, samples_generator
from lmm_r1.rl.step import Learner, train_on
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor, TrainedWorker
from lmm_r1.scoring import Moment
from lmm_r1.train.stopping import Progress, SaveSchedule, StopRequests

logger = logging.getLogger(__name__)

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


class RLRun:
    """The steps of a run, which can be stopped and resumed at any step."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        models: Models,
        engines: Sequence[Any],
        prompts: PromptStream,
        eval_rows: Sequence[Row],
        folder: RunFolder,
        stops: StopRequests | None = None,
        trackers: Trackers | None = None,
        disagreeing: frozenset[Modality] = frozenset(),
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.eval_rows = eval_rows
        self.folder = folder
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        self.total_steps = total_steps(config, num_rows=len(prompts.rows))
        kl = config.algo.kl
        self.learner = Learner(
            config=config,
            models=models,
            engines=engines,
            prompts=prompts,
            generator=samples_generator(config, engines, leave_out=folder.leave_out),
            kl_weight=KLWeight(value=kl.init_coef, target=kl.target, horizon=kl.horizon),
            mismatch=Mismatch(config, unchecked=disagreeing),
        )
        self.recorder = Recorder(
            config=config,
            folder=folder,
            trackers=trackers or Trackers(),
            total_steps=self.total_steps,
            console=self.console,
        )
        self.checkpoints = Checkpoints(
            config=config, models=models, best=BestEvaluation(key=config.ckpt.best_metric_key or "")
        )
        self.schedule = SaveSchedule.of(config.ckpt)
        self.stops = stops or StopRequests()
        self.step = self.saved_step = 0
        # The place in the prompts after the last step.
        self.position: Mapping[str, Any] = prompts.state_dict()
        # During a step, how many updates the models' weights had before it.
        self.updates_before: list[int] | None = None

    def fit(self) -> int:
        """Train from the last saved step to the end of the prompts and return the number of steps.

        If the run ends early, its last whole step is saved first.
        """
        learner = self.learner
        learner.share_prefix = all(ask(learner.models.policy, KitPolicyActor.shares_prefix))
        if not self._resume() and self.config.ds.load_in_4bit:
            # The engines have loaded the checkpoint, and the policy computes with its weights in 4 bits.
            learner.send_weights()
        self.position = self.prompts.state_dict()
        ray.get([engine.set_weight_version.remote(self.step) for engine in learner.engines])
        self.stops.progress = self.progress
        self.folder.resume(self.step)
        # Earlier sessions have logged what lies before.
        scaling_metrics(learner.models, self.config, learner.loss_scaling)
        self._catch_up_on_evaluation()
        states = self.states()
        learner.source.start(self.step + 1)
        while self.folder.ended_at is None:
            began = time.perf_counter()
            try:
                self.stops.check()
                made = learner.source.take(self.step + 1)
                if made is None:
                    break
                if not made.is_whole:
                    self._report_end(made.rollout)
                    break
                with self.stops.held():
                    states = self._make_step(made, began=began)
                # Its media are freed before those of the next step arrive.
                del made
                learner.mismatch.hold(self.step)
                if self._evaluates_after(self.step):
                    self.checkpoints.save_if_best(self._evaluate(self.step), self.step, states)
            except (Exception, KeyboardInterrupt):
                learner.source.close()
                self._save_before_stop(states)
                raise
        learner.source.close()
        return self.step

    def _make_step(self, made: MadeRollout, *, began: float) -> dict[str, Any]:
        """Make the next step of a rollout, record it, save it if that is due, and return the states to save with it.

        Args:
            began: when the step began, which includes waiting for its rollout.
        """
        taken = time.perf_counter()
        self.updates_before = updates_made(self.learner.models)
        metrics = train_on(self.learner, made.rollout, step=self.step + 1)
        self.step += 1
        self.updates_before = None
        self.position = made.position
        self.recorder.step(self.step, metrics | self._run_metrics(made, began=began, taken=taken), made.rollout)
        states = self.states()
        if self.schedule.is_due(self.step):
            self._save(states)
        return states

    def _run_metrics(self, made: MadeRollout, *, began: float, taken: float) -> dict[str, float]:
        """Return the metrics of a step that come from the run around it."""
        now, rollout, config = time.perf_counter(), made.rollout, self.config
        metrics: dict[str, float] = {"timing/generation": made.ended - made.began, "timing/step_total": now - began}
        samples = [sample for group in rollout.groups for sample in group]
        if config.train.async_enable:
            metrics |= ages(samples, updates=self.step - 1)
        if isinstance(source := self.learner.source, RolloutsAhead):
            metrics["timing/trainer_waits"] = source.take_waited()
            metrics["timing/engines_wait"] = made.waited_s
            spans = {"generation": (made.began, made.ended), "update": (taken, now)}
            metrics |= self.folder.spans(spans, now=now)
        return metrics

    def _resume(self) -> bool:
        """Restore the saved step, if there is one, and say whether there is: data position, weights and so on."""
        states = self.checkpoints.loaded_states()
        if not states:
            return False
        self.checkpoints.best.restore(states)
        self.prompts.load_state_dict(states["data_loader_state_dict"])
        if self.learner.kl_weight.target and "kl_coef" in states:
            self.learner.kl_weight.value = states["kl_coef"]
        self.step = self.saved_step = states["global_step"]
        self.learner.send_weights()
        self.console.print(f"{self.folder.name} resumed at step {self.step}/{self.total_steps}")
        return True

    def states(self) -> dict[str, Any]:
        """Return what is saved with the models, from which the run resumes."""
        return {
            "global_step": self.step,
            "data_loader_state_dict": dict(self.position),
            "kl_coef": self.learner.kl_weight.value,
        }

    def _save(self, states: Mapping[str, Any]) -> None:
        """Save the policy and the critic as they are after the step of `states`."""
        self.checkpoints.save(self.step, states)
        self.schedule.note_saved()
        if not self.config.ckpt.disable_ds:
            self.saved_step = self.step

    def _save_before_stop(self, states: Mapping[str, Any]) -> None:
        """Save the last whole step, unless it is already saved or weights have changed since."""
        if self.step in (0, self.saved_step) or self.config.ckpt.disable_ds:
            return
        try:
            with self.stops.held():
                if self.updates_before is None or self.updates_before == updates_made(self.learner.models):
                    self._save(states)
        except ray.exceptions.RayError as error:
            # The error that ends the run may have ended its workers too, and must not be hidden by this one.
            cause = in_worker(error)
            logger.warning("step %d could not be saved (%s)", self.step, (str(cause) or repr(cause)).splitlines()[0])

    def _evaluates_after(self, step: int) -> bool:
        every = self.config.eval.steps
        return bool(self.eval_rows) and every > 0 and step % every == 0

    def _catch_up_on_evaluation(self) -> None:
        """Make the evaluation that a kill prevented after the step's save, or the first one, if that is requested."""
        if self.step == 0:
            if self.config.eval.before_training and not self.folder.logged(0, prefix="eval_"):
                self._evaluate(0)
        elif self._evaluates_after(self.step):
            metrics = self.folder.logged(self.step, prefix="eval_") or self._evaluate(self.step)
            self.checkpoints.save_if_best(metrics, self.step, self.states())

    def _evaluate(self, step: int) -> dict[str, float]:
        """Generate responses to the held-out rows, record some and return their metrics."""
        found = self.learner.generator.evaluate(
            self.eval_rows,
            temperature=self.config.eval.temperature,
            n_samples=self.config.eval.n_samples_per_prompt,
            top_p=self.config.eval.top_p,
            top_k=self.config.eval.top_k,
            moment=Moment(step=step, held_out=True),
        )
        # Prompts that are too long have no responses.
        return self.recorder.evaluation(step, [group for group in found if group])

    def _report_end(self, rollout: Rollout) -> None:
        """Print that the prompts ended before a step was full; raises UserError if the run made no step at all."""
        why = why_dropped(
            self.learner.generator.group_filter,
            rollout.dropped,
            overlong=rollout.overlong,
            refused=rollout.refused,
            max_len=self.config.data.max_len,
        )
        made, batch = len(rollout.groups), self.config.rollout.batch_size
        reason = f"the prompts are used up with {made} of the {batch} groups of step {self.step + 1}: {why}"
        if self.step == 0:
            raise UserError(f"no step could be made: {reason}")
        self.console.print(f"{self.folder.name} ends with step {self.step}: {reason}")

    def progress(self) -> Progress:
        """Return how far the run has come, and what of it is on disk."""
        return Progress.of(self.config, step=self.step, total=self.total_steps, saved=self.saved_step)


def total_steps(config: PPOConfig, *, num_rows: int) -> int:
    """Return the rollout steps of a run in which no prompt is dropped, up to `--train.max_steps`."""
    steps = num_rows // config.rollout.batch_size * config.train.num_episodes
    return steps if config.train.max_steps < 0 else min(steps, config.train.max_steps)


def optimizer_steps(config: PPOConfig, *, num_rows: int, waits: int = 0) -> int:
    """Return the optimizer steps of a model, over which its learning rate is scheduled.

    Args:
        waits: rollout steps before the model is trained.
    """
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    per_step = -(-samples // config.train.batch_size) * config.train.max_epochs
    return max(0, total_steps(config, num_rows=num_rows) - waits) * per_step
