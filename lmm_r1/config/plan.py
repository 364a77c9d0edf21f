"""Every flag of `lmm-r1 plan`: those of the planned command, and the machine that it is planned for."""

from dataclasses import dataclass

from lmm_r1.config.dpo import DPOConfig
from lmm_r1.config.kd import KDConfig
from lmm_r1.config.kto import KTOConfig
from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.prm import PRMConfig
from lmm_r1.config.rm import RMConfig
from lmm_r1.config.sft import SFTConfig


@dataclass(frozen=True, kw_only=True)
class PlanMachineConfig:
    gpu_memory_gib: float | None = None
    """Memory of each GPU in GiB; 0 is a machine without GPUs, None this machine's."""
    host_memory_gib: float | None = None
    """Memory of each machine in GiB; None is this one's."""
    image_pixels: int = 0
    """Pixels of the prompts' images, one in each; 0 plans for text alone."""


@dataclass(frozen=True, kw_only=True)
class PlanSupervisedConfig(PlanMachineConfig):
    num_gpus: int = 1
    """Processes that the stage is launched with, each on a GPU of its own."""


@dataclass(frozen=True, kw_only=True)
class PlanPPOConfig(PlanMachineConfig, PPOConfig):
    """What an RL stage is planned by."""


@dataclass(frozen=True, kw_only=True)
class PlanSFTConfig(PlanSupervisedConfig, SFTConfig):
    """What a supervised stage is planned by."""


@dataclass(frozen=True, kw_only=True)
class PlanKDConfig(PlanSupervisedConfig, KDConfig):
    """What a distillation is planned by."""


@dataclass(frozen=True, kw_only=True)
class PlanDPOConfig(PlanSupervisedConfig, DPOConfig):
    """What a stage that learns from pairs is planned by."""


@dataclass(frozen=True, kw_only=True)
class PlanRMConfig(PlanSupervisedConfig, RMConfig):
    """What a reward model's training is planned by."""


@dataclass(frozen=True, kw_only=True)
class PlanKTOConfig(PlanSupervisedConfig, KTOConfig):
    """What a stage that learns from single responses is planned by."""


@dataclass(frozen=True, kw_only=True)
class PlanPRMConfig(PlanSupervisedConfig, PRMConfig):
    """What a process reward model's training is planned by."""
