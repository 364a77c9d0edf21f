"""Which settings of the choice of prompts and groups contradict each other."""

import math

from lmm_r1.config.ppo import AlgoConfig, PPOConfig
from lmm_r1.errors import UserError


def check_filters(config: PPOConfig) -> None:
    """Raise UserError for filters of groups that could drop nothing, or everything, and for a curriculum of nothing."""
    curriculum, episodes = config.data.curriculum, config.train.num_episodes
    if curriculum != "off" and episodes < 2:
        raise UserError(
            f"--data.curriculum {curriculum} orders prompts by what the episodes before have measured: "
            f"--train.num_episodes {episodes} must be at least 2"
        )
    algo, samples = config.algo, config.rollout.n_samples_per_prompt
    if algo.dynamic_filtering_max_batches < 0:
        raise UserError(
            f"--algo.dynamic_filtering_max_batches {algo.dynamic_filtering_max_batches} must be at least 1, or 0 for no bound"
        )
    if not algo.dynamic_filtering_enable:
        names = ["part", "min_std"] + ([] if algo.experience_filter else ["max_batches"])
        for name in [f"dynamic_filtering_{name}" for name in names]:
            if (value := getattr(algo, name)) != getattr(AlgoConfig, name):
                raise UserError(f"--algo.{name} {value} has no part without --algo.dynamic_filtering_enable; add it")
        return
    low, high = algo.dynamic_filtering_range
    # Of what is no number, too, nothing would be left.
    if not low < high:
        raise UserError(f"--algo.dynamic_filtering_range {low} {high}: the first must be below the second")
    least = algo.dynamic_filtering_min_std
    if least is not None and not (0 < least < math.inf):
        raise UserError(f"--algo.dynamic_filtering_min_std {least:g} must be above 0; leave it out for no bound")
    if samples < 2:
        raise UserError(
            f"--algo.dynamic_filtering_enable looks at a group's mean reward: "
            f"--rollout.n_samples_per_prompt {samples} must be at least 2"
        )
