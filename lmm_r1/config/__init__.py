"""Every flag of the commands, with its default and its help."""

from lmm_r1.config.differences import DIFFERENCES, ONLY_DEFAULTS, Difference
from lmm_r1.config.hardware import sized_ppo, sized_supervised
from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.resolve import (
    Config,
    checkpoint_folder,
    mismatch_limit,
    model_path,
    model_paths,
    resolve,
    resolve_ppo,
    to_yaml,
    unplanned,
    without_secrets,
)
from lmm_r1.config.supervised import DPOConfig, KDConfig, RMConfig, SFTConfig, SupervisedConfig
