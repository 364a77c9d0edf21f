"""The functions of a step of RL, with the arguments that the step gives them."""

from collections.abc import Sequence
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1.config import PPOConfig
from lmm_r1.data.sample import Sample
from lmm_r1.rl.batching import UpdatePasses, forward_passes, pass_limits, update_passes
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

    def forward_passes(self, samples: list[Experience]) -> list[Experience]:
        limits = pass_limits(self.config, self.config.rollout, share_prefix=self.share_prefix)
        return forward_passes(samples, ranks=self.models.ranks, limits=limits, pad_token_id=0)

    def with_outputs(self, passes: list[Experience]) -> list[Experience]:
        add_model_outputs(passes, self.models, self.config, mismatch=self.mismatch)
        return passes

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
            passes,
            batch_size=self.config.train.batch_size,
            ranks=self.models.ranks if self.models.all else 1,
            limits=pass_limits(self.config, self.config.train, share_prefix=self.share_prefix),
            seed=f"{self.config.train.seed}-{step}",
        )
