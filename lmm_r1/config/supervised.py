"""Flags that every supervised trainer has: `train_sft`, `train_kd`, `train_dpo`, `train_kto`, `train_prm`, `train_rm`."""

from dataclasses import dataclass, field
from typing import ClassVar

from lmm_r1.config.first_help import FirstHelp
from lmm_r1.config.rows import RowReadingConfig
from lmm_r1.config.shared import (
    AdamConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    EvalConfig,
    LoggerConfig,
    OptimizerConfig,
    SequenceConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    model_name_or_path: str | None = None
    """The model to train: a folder or a name on the Hugging Face Hub."""
    gradient_checkpointing_enable: bool | None = None
    """Save memory by computing activations again in the backward pass; None does so in as few layers as the GPU's memory asks
    for, and without a GPU only where the run would not fit."""
    gradient_checkpointing_layers: int | None = None
    """How many of the language model's layers do so, counted from the first; None is all, or chosen with the flag above."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant kind of checkpointing."""
    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts."""
    freeze_prefix: tuple[str, ...] = ()
    """Freeze the weights whose names begin so: `model.visual. lm_head.`."""


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainConfig(TrainConfig):
    micro_batch_size: int = 0
    """Samples in one forward and backward pass on one GPU; 0 takes 8, or what divides a GPU's share of an update."""
    max_steps: int = -1
    """Stop after this many updates; -1 runs all epochs."""


@dataclass(frozen=True, kw_only=True)
class SupervisedCheckpointConfig(CheckpointConfig):
    max_mem: int = 100_000_000
    """GiB that all checkpoints may take."""
    best_metric_key: str = ""
    """Evaluation metric by which the best checkpoint is kept; empty takes eval_loss, none keeps no best."""


@dataclass(frozen=True, kw_only=True)
class SupervisedDataConfig(SequenceConfig, RowReadingConfig):
    dataset: str | None = None
    """Row file or dataset to learn from; several are separated by commas."""
    dataset_probs: str | None = None
    """Share of each dataset, separated by commas."""
    dataset_split: str = "train"
    """Split of the dataset."""
    keep_order: bool = False
    """Take rows in the order of the files, easy ones first for example, instead of shuffling them every epoch."""
    max_samples: int = 1_000_000
    """Rows used at most."""
    tokenizer_chat_template: str | None = None
    """Chat template in place of the model's, as text or a file with it; the model is saved with it."""


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(OptimizerConfig):
    """Settings of one stage that learns from rows; `model` and so on are narrowed by each trainer."""

    first_help: ClassVar[FirstHelp]

    adam: AdamConfig = field(default_factory=AdamConfig)
    """AdamW."""
    model: TrainedModelConfig = field(default_factory=TrainedModelConfig)
    """The model."""
    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)
    """Rows."""
    train: SupervisedTrainConfig = field(default_factory=SupervisedTrainConfig)
    """The training loop."""
    ds: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """DeepSpeed."""
    ckpt: SupervisedCheckpointConfig = field(default_factory=SupervisedCheckpointConfig)
    """What is written."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation during training."""
    logger: LoggerConfig
    """Logs."""
    local_rank: int = -1
    """Set by launchers; -1 reads LOCAL_RANK."""
    use_ms: bool = False
    """Download models from ModelScope."""
