"""Every flag of `lmm-r1 train_sft`: OpenRLHF's names, and a few of this project's own."""

from dataclasses import dataclass, field
from typing import ClassVar

from lmm_r1.config.first_help import Example, FirstHelp, supervised_help
from lmm_r1.config.shared import AdamConfig, DataConfig, EvalConfig, LoggerConfig, WandbConfig, named_after_the_minute
from lmm_r1.config.supervised import (
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedTrainConfig,
    TrainedModelConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TrainedModelConfig):
    pretrain_mode_enable: bool = False
    """Every token is a loss token, the prompt's too; a column of plain text goes in as it stands, an end token behind."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainConfig(SupervisedTrainConfig):
    max_epochs: int = 2
    """Passes over the data."""


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(SupervisedDataConfig, DataConfig):
    output_key: str | None = None
    """Column with the response to what is in input_key, text or messages; None: the messages hold it."""
    multiturn: bool = True
    """Learn every turn of the assistant; --data.no_multiturn learns the last one only."""
    input_template: str | None = "User: {}\nAssistant: "
    """Text around a plain-text prompt, with {} in its place, which then goes to the model without its chat template."""


@dataclass(frozen=True, kw_only=True)
class SFTEvalConfig(EvalConfig):
    verifier: str | None = None
    """Verifier (`math`, `list:unordered`) that also judges a greedy answer to every row, with ZeRO below stage 3.

    None measures only the loss.
    """
    max_new_tokens: int = 1024
    """Longest answer in tokens, as far as the prompt leaves room for it in data.max_len."""


@dataclass(frozen=True, kw_only=True)
class SFTLoggerConfig(LoggerConfig):
    stage_name: str = "sft"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("sft", project="openrlhf_train_sft"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Settings of one supervised stage."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        Example(
            what="Learn the responses in a file of conversations",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset rows.jsonl --ckpt.output_dir runs/sft",
        ),
        Example(
            what="Train adapters instead of all weights, and measure a held-out file",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset rows.jsonl --ds.lora.rank 16"
            " --eval.dataset held_out.jsonl --eval.verifier math --ckpt.output_dir runs/lora",
        ),
        Example(
            what="Take the settings from a file, some of them changed",
            arguments="--config examples/scripts/lmm_r1/configs/cold_start.yaml"
            " --model.model_name_or_path models/vlm-3b"
            " --data.dataset rows.jsonl --adam.lr 1e-5",
        ),
        flags=("train.micro_batch_size", "ds.lora.rank"),
    )

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=5e-6))
    """AdamW."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Rows."""
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    """The training loop."""
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    """Evaluation during training."""
    logger: SFTLoggerConfig = field(default_factory=SFTLoggerConfig)
    """Logs."""
