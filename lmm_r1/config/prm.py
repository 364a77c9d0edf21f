"""Every flag of `lmm-r1 train_prm`: the names of OpenRLHF's former command where it had them, and this project's own."""

from dataclasses import dataclass, field
from typing import ClassVar

from lmm_r1.config.dpo import DPOEvalConfig
from lmm_r1.config.first_help import Example, FirstHelp, supervised_help
from lmm_r1.config.shared import AdamConfig, LoggerConfig, WandbConfig, named_after_the_minute
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
    batch_size: int = 0
    """Rows in one weight update, over all GPUs; 0 takes 128, or a fifth of the rows where that is less."""
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
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("prm", project="openrlhf_train_prm"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class PRMConfig(SupervisedConfig):
    """Settings of one stage that trains a process reward model on steps with labels."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        Example(
            what="Learn the labels of steps, each of which a token of the model ends",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --model.placeholder_token '<|fim_pad|>'"
            " --data.dataset steps.jsonl --ckpt.output_dir runs/prm",
        ),
        Example(
            what="Longer solutions without padding, evaluated every 50 updates",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --model.placeholder_token '<|fim_pad|>'"
            " --data.dataset steps.jsonl --data.max_len 4096 --ds.packing_samples"
            " --eval.dataset held_out.jsonl --eval.steps 50 --ckpt.output_dir runs/prm",
        ),
        Example(
            what="Train adapters instead of all weights",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --model.placeholder_token '<|fim_pad|>'"
            " --data.dataset steps.jsonl --ds.lora.rank 16 --ckpt.output_dir runs/lora",
        ),
        flags=("model.placeholder_token", "model.reward_tokens"),
    )

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
