"""Every flag of `lmm-r1 train_rm`: OpenRLHF's names, and a few of this project's own."""

from dataclasses import dataclass, field
from typing import ClassVar

from lmm_r1.config.dpo import PreferenceDataConfig, PreferenceTrainConfig
from lmm_r1.config.first_help import Example, FirstHelp, supervised_help
from lmm_r1.config.shared import AdamConfig, DeepSpeedConfig, LoggerConfig, WandbConfig, named_after_the_minute
from lmm_r1.config.supervised import SupervisedConfig, TrainedModelConfig

LOSS_TYPES = ("sigmoid", "regression")


@dataclass(frozen=True, kw_only=True)
class RMModelConfig(TrainedModelConfig):
    loss_type: str = "sigmoid"
    """sigmoid: the chosen response is to have the larger reward (Bradley-Terry); regression: rewards are to be the scores
    that the rows give both responses."""
    margin_loss_enable: bool = False
    """The chosen response's reward is to be larger by the row's margin; a row without one has 0."""
    compute_fp32_loss_enable: bool = False
    """Compute the loss in single precision, as it is here in any case."""


@dataclass(frozen=True, kw_only=True)
class RMTrainConfig(PreferenceTrainConfig):
    micro_batch_size: int = 1
    """Pairs in one forward and backward pass on one GPU."""


@dataclass(frozen=True, kw_only=True)
class RMDeepSpeedConfig(DeepSpeedConfig):
    value_head_prefix: str = "score"
    """Name of the value head in the saved model, and in a model to start from that has one."""


@dataclass(frozen=True, kw_only=True)
class RMLoggerConfig(LoggerConfig):
    stage_name: str = "rm"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("rm", project="openrlhf_train_rm"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """Settings of one stage that trains a reward model on pairs of responses."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        Example(
            what="Learn which of two responses is the better one",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset pairs.jsonl --ckpt.output_dir runs/rm",
        ),
        Example(
            what="Learn the scores that rows give their responses",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset pairs.jsonl --model.loss_type regression --ckpt.output_dir runs/scores",
        ),
        Example(
            what="Train adapters, and tell how many held-out pairs are ranked rightly",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset pairs.jsonl --ds.lora.rank 16"
            " --eval.dataset held_out.jsonl --ckpt.output_dir runs/lora",
        ),
        flags=("model.loss_type", "ds.lora.rank"),
    )

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    """AdamW."""
    model: RMModelConfig = field(default_factory=RMModelConfig)
    """The model and the loss."""
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Rows."""
    train: RMTrainConfig = field(default_factory=RMTrainConfig)
    """The training loop."""
    ds: RMDeepSpeedConfig = field(default_factory=RMDeepSpeedConfig)
    """DeepSpeed."""
    logger: RMLoggerConfig = field(default_factory=RMLoggerConfig)
    """Logs."""
