"""Every flag of `lmm-r1 train_sft`: OpenRLHF's names, and a few of this project's own."""

from dataclasses import dataclass, field
from datetime import datetime

from lmm_r1.config.shared import (
    AdamConfig,
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    EvalConfig,
    LoggerConfig,
    OptimizerConfig,
    TrainConfig,
    WandbConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model_name_or_path: str | None = None
    """The model to train: a folder or a name on the Hugging Face Hub."""
    gradient_checkpointing_enable: bool = False
    """Save memory by computing activations again in the backward pass."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant kind of checkpointing."""
    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts."""
    pretrain_mode_enable: bool = False
    """Every token is a loss token, the prompt's too; a column of plain text goes in as it stands, an end token behind."""
    freeze_prefix: tuple[str, ...] = ()
    """Freeze the weights whose names begin so: `model.visual. lm_head.`."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainConfig(TrainConfig):
    micro_batch_size: int = 8
    """Samples in one forward and backward pass on one GPU."""
    max_epochs: int = 2
    """Passes over the data."""
    max_steps: int = -1
    """Stop after this many updates; -1 runs all epochs."""


@dataclass(frozen=True, kw_only=True)
class SFTCheckpointConfig(CheckpointConfig):
    max_mem: int = 100_000_000
    """GiB that all checkpoints may take."""
    best_metric_key: str = ""
    """Evaluation metric by which the best checkpoint is kept; empty takes eval_loss, none keeps no best."""


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(DataConfig):
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
    output_key: str | None = None
    """Column with the response to what is in input_key, text or messages; None: the messages hold it."""
    multiturn: bool = True
    """Learn every turn of the assistant; --data.no_multiturn learns the last one only."""
    input_template: str | None = "User: {}\nAssistant: "
    """Text around a plain-text prompt, with {} in its place, which then goes to the model without its chat template."""
    tokenizer_chat_template: str | None = None
    """Chat template in place of the model's, as text or a file with it; the model is saved with it."""


@dataclass(frozen=True, kw_only=True)
class SFTEvalConfig(EvalConfig):
    verifier: str | None = None
    """Verifier (`math`, `list:unordered`) that judges a greedy answer to every row, too; None measures the loss alone."""
    max_new_tokens: int = 1024
    """Longest answer in tokens, as far as the prompt leaves room for it in data.max_len."""


@dataclass(frozen=True, kw_only=True)
class SFTLoggerConfig(LoggerConfig):
    stage_name: str = "sft"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(
        default_factory=lambda: WandbConfig(project="openrlhf_train_sft", run_name=f"sft_{datetime.now():%m%dT%H:%M}")
    )
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OptimizerConfig):
    """Settings of one supervised stage."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=5e-6))
    """AdamW."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Rows."""
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    """The training loop."""
    ds: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """DeepSpeed."""
    ckpt: SFTCheckpointConfig = field(default_factory=SFTCheckpointConfig)
    """What is written."""
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    """Evaluation during training."""
    logger: SFTLoggerConfig = field(default_factory=SFTLoggerConfig)
    """Logs."""
    local_rank: int = -1
    """Set by launchers; -1 reads LOCAL_RANK."""
    use_ms: bool = False
    """Download models from ModelScope."""
