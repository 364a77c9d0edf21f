"""The functions of a step of RL, with the arguments that the step gives them."""

from collections.abc import Sequence
from typing import Any

from helpers.experiences import samples_of
from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1.config import PPOConfig
from lmm_r1.data.sample import Sample
from lmm_r1.rl.batching import PassLimits, UpdatePasses, forward_plan, pass_limits, pass_of, update_passes
from lmm_r1.rl.experiences import add_advantages, add_model_outputs, experience_of
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.model_groups import Models


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


def numbered(samples: Sequence[Experience]) -> Sequence[Experience]:
    """Let samples know their places in the rollout."""
    for place, sample in enumerate(samples):
        sample.index = [place]
    return samples
