"""Every flag of `lmm-r1 train_prm`: the names of OpenRLHF's former command where it had them, and this project's own."""

from dataclasses import dataclass, field
from datetime import datetime

from lmm_r1.config.dpo import DPOEvalConfig
from lmm_r1.config.shared import AdamConfig, LoggerConfig, WandbConfig
from lmm_r1.config.supervised import (
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedTrainConfig,
    TrainedModelConfig,
)


@dataclass(frozen=True, kw_only=True)
class PRMModelConfig(TrainedModelConfig):
    placeholder_token: str | None = None
    """Token behind each step, at which the step is judged: one of the tokenizer's that occurs nowhere else."""
    reward_tokens: tuple[str, ...] = ("+", "-")
    """What the model predicts at a right step and at a wrong one; the loss is over these two tokens."""


@dataclass(frozen=True, kw_only=True)
class StepDataConfig(SupervisedDataConfig):
    input_key: str | None = None
    """Column with the prompt, or with question and steps in one text; None takes the format's."""
    label_key: str | None = None
    """Column with the steps' labels; None takes the format's."""
    step_tag: str | None = None
    """What stands behind each step in a text with steps; None is model.placeholder_token."""


@dataclass(frozen=True, kw_only=True)
class PRMTrainConfig(SupervisedTrainConfig):
    batch_size: int = 128
    """Rows in one weight update, over all GPUs."""
    micro_batch_size: int = 1
    """Rows in one forward and backward pass on one GPU."""
    shared_prefix_enable: bool = True
    """With --ds.packing_samples, compute what rows of one prompt in a pass have in common once: prompt, images, first steps."""
    group_prompts_enable: bool = False
    """Shuffle prompts instead of rows, so that the solutions of one prompt follow one another and fall into one pass."""


@dataclass(frozen=True, kw_only=True)
class PRMLoggerConfig(LoggerConfig):
    stage_name: str = "prm"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(
        default_factory=lambda: WandbConfig(project="openrlhf_train_prm", run_name=f"prm_{datetime.now():%m%dT%H:%M}")
    )
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class PRMConfig(SupervisedConfig):
    """Settings of one stage that trains a process reward model on steps with labels."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-6))
    """AdamW."""
    model: PRMModelConfig = field(default_factory=PRMModelConfig)
    """The model and the loss."""
    data: StepDataConfig = field(default_factory=StepDataConfig)
    """Rows."""
    train: PRMTrainConfig = field(default_factory=PRMTrainConfig)
    """The training loop."""
    eval: DPOEvalConfig = field(default_factory=DPOEvalConfig)
    """Evaluation during training."""
    logger: PRMLoggerConfig = field(default_factory=PRMLoggerConfig)
    """Logs."""
