"""The one place where a flag of the training commands, its default and its help stand."""

from typing import TypeVar

from lmm_r1.config.differences import DIFFERENCES, NOT_YET, Difference
from lmm_r1.config.export import checkpoint_folder, to_yaml, unplanned, without_secrets
from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.preferences import DPOConfig, KTOConfig, PRMConfig, RMConfig
from lmm_r1.config.resolve import (
    mismatch_limit,
    resolve_dpo,
    resolve_kd,
    resolve_kto,
    resolve_ppo,
    resolve_prm,
    resolve_rm,
    resolve_sft,
)
from lmm_r1.config.sizes import sized_ppo, sized_supervised
from lmm_r1.config.supervised import KDConfig, SFTConfig, SupervisedConfig

Config = TypeVar("Config", PPOConfig, KDConfig, SFTConfig, DPOConfig, RMConfig, KTOConfig, PRMConfig)


def resolve(config: Config) -> Config:
    """Return `config` with every value that depends on others filled in, or raise a UserError naming the flags."""
    if isinstance(config, PPOConfig):
        return resolve_ppo(config)
    if isinstance(config, DPOConfig):
        return resolve_dpo(config)
    if isinstance(config, KDConfig):
        return resolve_kd(config)
    if isinstance(config, KTOConfig):
        return resolve_kto(config)
    if isinstance(config, PRMConfig):
        return resolve_prm(config)
    return resolve_rm(config) if isinstance(config, RMConfig) else resolve_sft(config)
