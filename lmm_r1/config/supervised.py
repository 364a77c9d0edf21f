"""The settings that supervised commands share, and those of SFT and distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from lmm_r1.config.declared import Needs, Within
from lmm_r1.config.shared import (
    ONE_TEMPLATE,
    PROMPT_COLUMN,
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    EvalConfig,
    FirstHelp,
    LoggerConfig,
    OptimizerConfig,
    RowReadingConfig,
    SequenceConfig,
    TrainConfig,
    TrainedModelConfig,
    logged_as,
    supervised_help,
)


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainConfig(TrainConfig):
    micro_batch_size: Annotated[int, Within("[0, inf)")] = 0
    """Samples in one forward and backward pass on one GPU. 0 takes 8, or a divisor of a GPU's share of an update."""
    max_steps: Annotated[int, Within("[1, inf)", besides=(-1,))] = -1
    """Stop after this many updates; -1 runs all epochs."""


@dataclass(frozen=True, kw_only=True)
class SupervisedCheckpointConfig(CheckpointConfig):
    max_mem: Annotated[int, Within("[1, inf)")] = 100_000_000
    """Maximum size of all checkpoints in GiB."""
    best_metric_key: Annotated[str, Needs("eval.dataset or .best_metric_key=none")] = ""
    """Evaluation metric by which the best checkpoint is kept. Empty takes eval_loss; none keeps no best checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SupervisedDataConfig(SequenceConfig, RowReadingConfig):
    dataset: str | None = None
    """Row file or dataset to train on; separate several by commas."""
    dataset_probs: str | None = None
    """Share of each dataset, separated by commas."""
    dataset_split: str = "train"
    """Split of the dataset."""
    dataloader_num_workers: Annotated[int, Within("[0, inf)")] = 0
    """Processes that read and encode rows ahead of the training step; 0 does it between steps."""
    keep_order: bool = False
    """Take rows in the order of the files, for example easy ones first, instead of shuffling them every epoch."""
    max_samples: Annotated[int, Within("[1, inf)")] = 1_000_000
    """Maximum number of rows."""
    tokenizer_chat_template: str | None = None
    """Chat template that replaces the model's, as text or a file; it is saved with the model."""


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(OptimizerConfig):
    """Settings of one stage that trains on rows; each trainer narrows `model` and the other groups."""

    first_help: ClassVar[FirstHelp]

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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TrainedModelConfig):
    pretrain_mode_enable: bool = False
    """Train on every token, including the prompt's. A column of plain text is used as it is, followed by an end
    token."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainConfig(SupervisedTrainConfig):
    max_epochs: Annotated[int, Within("[1, inf)")] = 2
    """Passes over the data."""


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(SupervisedDataConfig, DataConfig):
    output_key: str | None = None
    """Column with the response to input_key, text or messages; None takes the response from the messages."""
    multiturn: Annotated[
        bool, Needs("model.pretrain_mode_enable=False", when="False", because="it trains on every token")
    ] = True
    """Train on every assistant turn; --data.no_multiturn trains on the last one only."""
    input_template: Annotated[str | None, ONE_TEMPLATE, PROMPT_COLUMN] = "User: {}\nAssistant: "
    """Text around a plain-text prompt, which replaces {}; the prompt then goes to the model without its chat
    template."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Settings of one supervised stage."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        """
        # Train on the responses in a file of conversations
        --ckpt.output_dir runs/sft
        # Train adapters instead of all weights, and measure a held-out file
        --ds.lora.rank 16 --eval.dataset held_out.jsonl --ckpt.output_dir runs/lora
        # Take the settings from a file, some of them changed
        --adam.lr 1e-5 --config examples/scripts/lmm_r1/configs/cold_start.yaml
        """,
        rows="rows.jsonl",
        flags="train.micro_batch_size ds.lora.rank",
    )

    full_lr: ClassVar[float] = 5e-6

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Rows."""
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    """The training loop."""
    logger: LoggerConfig = field(default_factory=lambda: logged_as("sft"))
    """Logs."""


DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, kw_only=True)
class KDModelConfig(ModelConfig):
    kd_coef: Annotated[float, Within("(0, 1]")] = 0.4
    """Weight of the distance to the teacher in the loss; the rows' own tokens (cross-entropy) have weight 1 -
    kd_coef."""
    kd_loss: DivergenceName = "forward_kl"
    """Distance to the teacher: KL(teacher || student), KL(student || teacher), or the generalized Jensen-Shannon
    divergence."""
    kd_beta: Annotated[float, Within("(0, 1)"), Needs(".kd_loss=jsd")] = 0.5
    """For kd_loss jsd: the teacher's share of the mixture. Near 0 it is like forward_kl, near 1 like reverse_kl."""
    kd_temperature: Annotated[float, Within("(0, inf)")] = 1.0
    """Divisor of both models' logits in the distance."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    model_name_or_path: str | None = None
    """The frozen teacher. It has the student's tokenizer; its size may differ."""
    offload: Annotated[bool, Needs("ds.zero_stage=3")] = False
    """Keep the teacher in CPU memory; needs --ds.zero_stage 3."""


@dataclass(frozen=True, kw_only=True)
class KDConfig(SFTConfig):
    """Settings of one stage that trains on a teacher's token distributions."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        """
        # Train on a larger model's distributions over the rows
        --teacher.model_name_or_path models/vlm-7b --ckpt.output_dir runs/kd
        # The reverse KL
        --teacher.model_name_or_path models/vlm-7b --model.kd_loss reverse_kl --ckpt.output_dir runs/reverse
        # Longer sequences without padding, evaluated each 50 updates
        --teacher.model_name_or_path models/vlm-7b --data.max_len 8192 --ds.packing_samples --eval.dataset held_out.jsonl
        --eval.steps 50 --ckpt.output_dir runs/kd
        """,
        rows="rows.jsonl",
        flags="teacher.model_name_or_path model.kd_loss",
    )

    model: KDModelConfig = field(default_factory=KDModelConfig)
    """The student and the loss."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher."""
    logger: LoggerConfig = field(default_factory=lambda: logged_as("kd"))
    """Logs."""
