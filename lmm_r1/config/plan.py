"""Every flag of `lmm-r1 plan`: those of the planned command, and the machine that it is planned for."""

from dataclasses import dataclass
from typing import ClassVar

from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.preferences import DPOConfig, KTOConfig, PRMConfig, RMConfig
from lmm_r1.config.shared import Example, FirstHelp
from lmm_r1.config.supervised import KDConfig, SFTConfig


@dataclass(frozen=True, kw_only=True)
class PlanMachineConfig:
    gpu_memory_gib: float | None = None
    """Memory of each GPU in GiB; 0 is a machine without GPUs, None this machine's."""
    host_memory_gib: float | None = None
    """Memory of each machine in GiB; None is this one's, and not checked for GPUs that gpu_memory_gib names."""
    image_pixels: int = 0
    """Pixels of the prompts' images, one in each; 0 plans for text alone."""


@dataclass(frozen=True, kw_only=True)
class PlanSupervisedConfig(PlanMachineConfig):
    first_help: ClassVar[FirstHelp] = FirstHelp(
        examples=(
            Example(
                what="On this machine, with the settings that a run would have",
                arguments="--model.model_name_or_path models/vlm-3b",
            ),
            Example(
                what="On eight GPUs of 80 GB, with ZeRO-3 and longer sequences",
                arguments="--model.model_name_or_path models/vlm-3b"
                " --num_gpus 8 --gpu_memory_gib 80 --ds.zero_stage 3 --data.max_len 8192",
            ),
            Example(
                what="Adapters on one smaller GPU, with an image of a megapixel in each row",
                arguments="--model.model_name_or_path models/vlm-3b"
                " --gpu_memory_gib 24 --image_pixels 1000000 --ds.lora.rank 16",
            ),
        ),
        flags=(
            "model.model_name_or_path",
            "num_gpus",
            "gpu_memory_gib",
            "host_memory_gib",
            "image_pixels",
            "data.max_len",
            "train.batch_size",
            "train.micro_batch_size",
            "ds.zero_stage",
            "ds.lora.rank",
        ),
    )

    num_gpus: int = 1
    """Processes that the stage is launched with, each on a GPU of its own."""


@dataclass(frozen=True, kw_only=True)
class PlanPPOConfig(PlanMachineConfig, PPOConfig):
    """What an RL stage is planned by."""

    num_gpus: int | None = None
    """GPUs of the one machine that the stage runs on, divided or shared as a run there would; None is what this machine has."""

    first_help: ClassVar[FirstHelp] = FirstHelp(
        examples=(
            Example(
                what="A stage of LMM-R1 on its eight GPUs of 80 GB",
                arguments="--config examples/scripts/lmm_r1/configs/fre_text.yaml"
                " --actor.model_name_or_path models/vlm-3b"
                " --gpu_memory_gib 80",
            ),
            Example(
                what="The same on GPUs of 24 GB, which it does not fit: what to change",
                arguments="--config examples/scripts/lmm_r1/configs/fre_text.yaml"
                " --actor.model_name_or_path models/vlm-3b"
                " --gpu_memory_gib 24",
            ),
            Example(
                what="A run without further flags on one GPU of 80 GB, with images",
                arguments="--actor.model_name_or_path models/vlm-3b"
                " --num_gpus 1 --gpu_memory_gib 80 --image_pixels 1000000",
            ),
        ),
        flags=(
            "actor.model_name_or_path",
            "num_gpus",
            "gpu_memory_gib",
            "host_memory_gib",
            "image_pixels",
            "rollout.n_samples_per_prompt",
            "rollout.max_new_tokens",
            "train.colocate_all",
            "ds.zero_stage",
            "vllm.gpu_memory_utilization",
        ),
    )


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
