"""Every flag of `lmm-r1 train_kto`: the names of OpenRLHF's former command where it had them, and this project's own."""

from dataclasses import dataclass, field
from typing import ClassVar

from lmm_r1.config.dpo import DPOEvalConfig, PreferenceTrainConfig, ReferredConfig
from lmm_r1.config.first_help import Example, FirstHelp, supervised_help
from lmm_r1.config.shared import AdamConfig, LoggerConfig, WandbConfig, named_after_the_minute
from lmm_r1.config.supervised import SupervisedDataConfig, TrainedModelConfig


@dataclass(frozen=True, kw_only=True)
class KTOModelConfig(TrainedModelConfig):
    beta: float = 0.1
    """How closely the policy is held to the reference; a response's reward is beta times its log-ratio of the two."""
    desirable_loss_weight: float = 1.0
    """Weight of the loss of a desirable response."""
    undesirable_loss_weight: float = 1.0
    """Weight of the loss of an undesirable response."""


@dataclass(frozen=True, kw_only=True)
class UnpairedDataConfig(SupervisedDataConfig):
    input_key: str | None = None
    """Column with the prompt, text or messages; None takes the format's."""
    output_key: str | None = None
    """Column with the response; None takes the format's, or the last turn of the conversation."""
    label_key: str | None = None
    """Column that says whether the response is desirable; None takes the format's."""


@dataclass(frozen=True, kw_only=True)
class KTOTrainConfig(PreferenceTrainConfig):
    batch_size: int = 0
    """Rows in one weight update, over all GPUs; the KL is estimated over them. 0 takes 128, or a fifth of the rows where that
    is less."""
    micro_batch_size: int = 0
    """Rows in one forward and backward pass on one GPU; 0 takes 8, or what divides a GPU's share of an update."""
    shared_prefix_enable: bool = True
    """Let the reference compute the prompt and images of a row once for its own response and for the mismatched one."""


@dataclass(frozen=True, kw_only=True)
class KTOLoggerConfig(LoggerConfig):
    stage_name: str = "kto"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("kto", project="openrlhf_train_kto"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferredConfig):
    """Settings of one stage that learns from responses that are desirable or not."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        Example(
            what="Learn from single responses, each desirable or not",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset judged.jsonl --ckpt.output_dir runs/kto",
        ),
        Example(
            what="Columns by other names, and undesirable responses that count half",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset judged.jsonl --data.output_key response --data.label_key liked"
            " --model.undesirable_loss_weight 0.5 --ckpt.output_dir runs/kto",
        ),
        Example(
            what="Train adapters, for which no second model is loaded as reference",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset judged.jsonl --ds.lora.rank 16 --ckpt.output_dir runs/lora",
        ),
        flags=("model.beta", "ds.lora.rank"),
    )

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    """AdamW."""
    model: KTOModelConfig = field(default_factory=KTOModelConfig)
    """The model and the loss."""
    data: UnpairedDataConfig = field(default_factory=UnpairedDataConfig)
    """Rows."""
    train: KTOTrainConfig = field(default_factory=KTOTrainConfig)
    """The training loop."""
    eval: DPOEvalConfig = field(default_factory=DPOEvalConfig)
    """Evaluation during training."""
    logger: KTOLoggerConfig = field(default_factory=KTOLoggerConfig)
    """Logs."""
