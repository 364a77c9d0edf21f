"""One RL step, from the prompts to the engines' new weights.

`make_rollout` and `train_on` are its halves: with `--train.async_enable`, the next rollout is made during an update.

An engine encodes a `Row` as an `EncodedPrompt` and returns `Sample`s of it. Here a sample becomes a `TrainingSample`: tensors
without padding, to which models and estimator add theirs. A pass is a list of these, which its worker packs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmm_r1.config import PPOConfig
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.host.optimizer import LossScaling
from lmm_r1.rl.advantages import KLWeight
from lmm_r1.rl.losses import LossSettings
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.model_groups import (
    Models,
    feature_metrics,
    hand_out,
    scaling_metrics,
    send_weights,
    take_gaps,
    trains_policy,
    update_models,
    worker_errors,
)
from lmm_r1.rl.outputs import add_advantages, add_model_outputs
from lmm_r1.rl.records import rollout_metrics
from lmm_r1.rl.rollouts import KitSamplesGenerator, MadeRollout, Rollout, RolloutsAhead, RolloutsInTurn
from lmm_r1.rl.samples import PassLimits, TrainingSample, pass_limits, update_passes
from lmm_r1.scoring import Moment


@dataclass(kw_only=True)
class Learner:
    """What the steps of a run work with."""

    config: PPOConfig
    models: Models
    engines: Sequence[Any]
    prompts: PromptStream
    generator: KitSamplesGenerator
    kl_weight: KLWeight
    mismatch: Mismatch
    """Compares the engines' log-probs with the trainer's."""
    share_prefix: bool = False
    """Whether the models compute once what the samples of a group begin with: they say so when they are loaded."""
    loss_scaling: dict[str, LossScaling] = field(default_factory=dict)
    """The state of fp16's loss scaling after the last step."""
    source: RolloutsInTurn | RolloutsAhead = field(init=False)

    def __post_init__(self) -> None:
        train, make = self.config.train, partial(make_rollout, self)
        self.source = (
            RolloutsAhead(make, ahead=train.async_queue_size, across_updates=train.partial_rollout_enable)
            if train.async_enable
            else RolloutsInTurn(make)
        )

    def limits(self, settings: Any) -> PassLimits:
        """Return what one pass may hold, by `--rollout.*` or `--train.*`."""
        return pass_limits(self.config, settings, share_prefix=self.share_prefix)

    def send_weights(self) -> None:
        """Send the policy's weights to the engines, which are between rollouts or pause in one."""
        with self.source.replacing():
            send_weights(self.models.policy, self.engines, self.config)


def make_rollout(learner: Learner, step: int) -> MadeRollout | None:
    """Return the rollout of a step, counted from 1; None after the last one: of `--train.max_steps`, or of the prompts."""
    generator, prompts, count = learner.generator, learner.prompts, learner.config.rollout.batch_size
    if 0 <= learner.config.train.max_steps < step:
        return None
    if not prompts.has(count):
        return None
    began = time.perf_counter()
    moment = Moment(step=step, held_out=False)
    # The engines generate the responses, and score each as soon as it is finished.
    rollout = generator.rollout(prompts, count=count, moment=moment)
    return MadeRollout(
        rollout=rollout,
        is_whole=len(rollout.groups) == count,
        position=prompts.state_dict(),
        began=began,
        ended=time.perf_counter(),
    )


def train_on(learner: Learner, rollout: Rollout, *, step: int) -> dict[str, float]:
    """Train on the rollout of a step, send the new weights to the engines and return the step's metrics.

    Raises UserError, before any weight changes, if a reward, a log-prob or an advantage is wrong.

    Args:
        step: counted from 1.
    """
    config, models, kl_weight = learner.config, learner.models, learner.kl_weight
    samples, began = rollout.samples, time.perf_counter()

    # Old and reference log-probs, values, and the rewards of a reward model.
    limits = learner.limits(config.rollout)
    add_model_outputs(samples, models, config, limits=limits, mismatch=learner.mismatch)

    # Advantages.
    greedy = [TrainingSample.of(sample, max_len=config.data.max_len) for sample in rollout.greedy]
    add_advantages(samples, config, kl_weight=kl_weight.value, greedy=greedy)
    made = time.perf_counter()
    means = rollout_metrics(samples)

    # The passes of every optimizer step.
    update = update_passes(
        samples,
        batch_size=config.train.batch_size,
        ranks=models.ranks,
        limits=learner.limits(config.train),
        seed=f"{config.train.seed}-{step - 1}",
    )
    # Without a gradient, only Adam's momentum and the weight decay would move the weights.
    silent = means["groups_without_signal"] == 1.0 and not config.actor.aux_loss_coef
    silent = silent and LossSettings.of(config).follows_advantages
    with_policy = trains_policy(config, step=step) and not silent
    fits = hand_out(update.steps, models, trains_policy=with_policy, kl_weight=kl_weight.value)
    handed_out = time.perf_counter()

    # The update.
    with worker_errors(prefix=f"step {step}: "):
        metrics = means | update_models(fits, config)
    metrics |= scaling_metrics(models, config, learner.loss_scaling)
    trained = time.perf_counter()
    metrics["tokens/update_unique"] = update.unique_tokens * config.train.max_epochs
    metrics |= feature_metrics(models)
    metrics |= learner.mismatch.take_metrics(take_gaps(models.policy))

    # The engines' weights.
    learner.send_weights()
    if "kl" in metrics:
        kl_weight.update(metrics["kl"], samples=len(samples))
    timing = {
        "timing/make_experience": made - began,
        "timing/hand_out": handed_out - made,
        "timing/ppo_train": trained - handed_out,
        "timing/broadcast": time.perf_counter() - trained,
    }
    return metrics | timing
