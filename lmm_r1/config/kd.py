"""Every flag of `lmm-r1 train_kd`: those of `train_sft`, the teacher's, and which distance to it is made small."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lmm_r1.config.first_help import Example, FirstHelp, supervised_help
from lmm_r1.config.sft import ModelConfig, SFTConfig, SFTLoggerConfig
from lmm_r1.config.shared import WandbConfig, named_after_the_minute

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, kw_only=True)
class KDModelConfig(ModelConfig):
    kd_coef: float = 0.4
    """Weight of the distance to the teacher in the loss; that of the rows' own tokens (cross-entropy) is what it leaves of 1."""
    kd_loss: DivergenceName = "forward_kl"
    """Distance: KL of the student from the teacher, the reverse, or the generalized Jensen-Shannon divergence."""
    kd_beta: float = 0.5
    """Of kd_loss jsd: the teacher's share of the mixture; towards 0 it is like forward_kl, towards 1 like reverse_kl."""
    kd_temperature: float = 1.0
    """What the logits of both models are divided by for the distance."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    model_name_or_path: str | None = None
    """The teacher, which stays as it is; its tokenizer is the student's, its size may be another."""
    offload: bool = False
    """Keep the teacher in CPU memory; needs --ds.zero_stage 3."""


@dataclass(frozen=True, kw_only=True)
class StudentRolloutConfig:
    on_policy_share: float = 0.0
    """Share of updates for which the student samples its own responses to the rows' prompts, GKD's lambda; 0 is none."""
    max_new_tokens: int = 1024
    """Longest of these responses in tokens, as far as the prompt leaves room for it in data.max_len."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Nucleus of the sampling."""


@dataclass(frozen=True, kw_only=True)
class StudentEngineConfig:
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for the student's engine, next to what trains on it; None is what its responses need, as far as
    there is room for it."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs; None does so for small models only."""


@dataclass(frozen=True, kw_only=True)
class KDLoggerConfig(SFTLoggerConfig):
    stage_name: str = "kd"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("kd", project="openrlhf_train_kd"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class KDConfig(SFTConfig):
    """Settings of one stage that learns a teacher's distributions over tokens."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        Example(
            what="Learn a larger model's distributions over the tokens of rows",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --teacher.model_name_or_path models/vlm-7b"
            " --data.dataset rows.jsonl --ckpt.output_dir runs/kd",
        ),
        Example(
            what="The reverse KL, and half of the updates on the student's own responses",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --teacher.model_name_or_path models/vlm-7b"
            " --data.dataset rows.jsonl --model.kd_loss reverse_kl --rollout.on_policy_share 0.5"
            " --ckpt.output_dir runs/on_policy",
        ),
        Example(
            what="Longer sequences without padding, evaluated every 50 updates",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --teacher.model_name_or_path models/vlm-7b"
            " --data.dataset rows.jsonl --data.max_len 8192 --ds.packing_samples"
            " --eval.dataset held_out.jsonl --eval.steps 50 --ckpt.output_dir runs/packed",
        ),
        flags=("teacher.model_name_or_path", "model.kd_loss"),
    )

    model: KDModelConfig = field(default_factory=KDModelConfig)
    """The student and the loss."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher."""
    rollout: StudentRolloutConfig = field(default_factory=StudentRolloutConfig)
    """Responses of the student's own."""
    vllm: StudentEngineConfig = field(default_factory=StudentEngineConfig)
    """The engine that samples them."""
    logger: KDLoggerConfig = field(default_factory=KDLoggerConfig)
    """Logs."""
