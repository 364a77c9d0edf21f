"""The settings that supervised commands share, and those of SFT, distillation, DPO and reward models."""

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


@dataclass(frozen=True, kw_only=True)
class DPOModelConfig(TrainedModelConfig):
    beta: Annotated[float, Within("(0, inf)")] = 0.1
    """How strongly the policy is kept near the reference; a response's reward is beta times its log-ratio."""
    label_smoothing: Annotated[float, Within("[0, 0.5)"), Needs(".ipo_enable=False")] = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO); below 0.5."""
    ipo_enable: Annotated[bool, Needs(".simpo_enable=False")] = False
    """IPO: move the difference of the two log-ratios to 1 / (2 beta) instead of increasing it without limit."""
    simpo_enable: bool = False
    """SimPO: no reference model. Rewards are beta times the mean log-prob per token, with a margin of simpo_gamma."""
    simpo_gamma: Annotated[float, Within("[0, inf)"), Needs(".simpo_enable")] = 0.5
    """SimPO's margin between the rewards of the chosen and the rejected response."""
    mean_log_probs: Annotated[bool, Needs(".simpo_enable=False")] = False
    """Use the mean log-prob per token of each response instead of the sum, as TRL's IPO does."""
    nll_loss_coef: Annotated[float, Within("[0, inf)")] = 0.0
    """Weight of the chosen response's mean loss per token, added to each pair's loss."""


@dataclass(frozen=True, kw_only=True)
class DPORefConfig:
    model_name_or_path: str | None = None
    """The frozen reference model; None takes the initial model."""
    offload: Annotated[
        bool,
        Needs("ds.zero_stage=3"),
        Needs("ds.lora.rank=0 or .model_name_or_path", because="no second model is loaded as reference"),
    ] = False
    """Keep the reference model in CPU memory; needs --ds.zero_stage 3."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str | None = None
    """Column with the prompt, text or messages; None takes the format's, or the common beginning of both
    conversations."""
    chosen_key: str = "chosen"
    """Column with the better response: text, messages, or a whole conversation."""
    rejected_key: str = "rejected"
    """Column with the worse response, in the same form."""


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainConfig(SupervisedTrainConfig):
    batch_size: Annotated[int, Within("[0, inf)")] = 0
    """Pairs in one weight update, over all GPUs; 0 takes a fifth of the pairs, at most 128."""
    micro_batch_size: Annotated[int, Within("[0, inf)")] = 0
    """Pairs in one forward and backward pass on one GPU; 0 takes 8, or a divisor of a GPU's share of an update."""
    shared_prefix_enable: bool = True
    """Compute the common prefix of a pair's two responses once: prompt, images and equal first tokens."""


@dataclass(frozen=True, kw_only=True)
class DPOEvalConfig(EvalConfig):
    split: str = "test"
    """Split of the evaluation dataset."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """Settings of one stage that trains on pairs of responses."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        """
        # Train on pairs of a chosen and a rejected response
        --ckpt.output_dir runs/dpo
        # Train adapters, for which no second model is loaded as reference
        --ds.lora.rank 16 --ckpt.output_dir runs/lora
        # SimPO, which has no reference
        --model.simpo_enable --model.beta 2 --ckpt.output_dir runs/simpo
        """,
        rows="pairs.jsonl",
        flags="model.beta ds.lora.rank",
    )

    full_lr: ClassVar[float] = 1e-5

    model: DPOModelConfig = field(default_factory=DPOModelConfig)
    """The model and the loss."""
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Rows."""
    train: PreferenceTrainConfig = field(default_factory=PreferenceTrainConfig)
    """The training loop."""
    ref: Annotated[DPORefConfig, Needs("model.simpo_enable=False")] = field(default_factory=DPORefConfig)
    """The reference model."""
    eval: DPOEvalConfig = field(default_factory=DPOEvalConfig)
    """Evaluation during training."""
    logger: LoggerConfig = field(default_factory=lambda: logged_as("dpo", run="exp"))
    """Logs."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss uses a reference: SimPO does not."""
        return not self.model.simpo_enable

    @property
    def needs_reference_model(self) -> bool:
        """Whether a second model is loaded: not if the policy without its adapter is the reference."""
        return self.has_reference and not self.refers_to_base

    @property
    def refers_to_base(self) -> bool:
        """Whether the reference is the policy with its LoRA adapter switched off."""
        same = self.ref.model_name_or_path in (None, self.model.model_name_or_path)
        return self.has_reference and self.ds.lora.rank > 0 and same


@dataclass(frozen=True, kw_only=True)
class RMModelConfig(TrainedModelConfig):
    loss_type: Literal["sigmoid", "regression"] = "sigmoid"
    """sigmoid gives the chosen response the larger reward (Bradley-Terry); regression predicts the scores of both
    responses in the row."""
    aux_loss_coef: Annotated[float, Within("[0, 0]")] = 0.0
    """A reward model has no load-balancing loss: only 0."""
    margin_loss_enable: Annotated[bool, Needs(".loss_type=sigmoid")] = False
    """Require the chosen response's reward to be larger by the row's margin, which is 0 if missing."""


@dataclass(frozen=True, kw_only=True)
class RMTrainConfig(PreferenceTrainConfig):
    micro_batch_size: Annotated[int, Within("[0, inf)")] = 1
    """Pairs in one forward and backward pass on one GPU."""


@dataclass(frozen=True, kw_only=True)
class RMDeepSpeedConfig(DeepSpeedConfig):
    tensor_parallel_size: Annotated[int, Within("[1, 1]")] = 1
    """A value head is not split: only 1."""
    value_head_prefix: str = "score"
    """Name of the value head in the saved model, and in an initial model that has one."""


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """Settings of one stage that trains a reward model on pairs of responses."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        """
        # Train on pairs: which response is better
        --ckpt.output_dir runs/rm
        # Train on the scores of the rows' responses
        --model.loss_type regression --ckpt.output_dir runs/scores
        # Train adapters, and report how many held-out pairs are ranked correctly
        --ds.lora.rank 16 --eval.dataset held_out.jsonl --ckpt.output_dir runs/lora
        """,
        rows="pairs.jsonl",
        flags="model.loss_type ds.lora.rank",
    )

    full_lr: ClassVar[float] = 9e-6

    model: RMModelConfig = field(default_factory=RMModelConfig)
    """The model and the loss."""
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Rows."""
    train: RMTrainConfig = field(default_factory=RMTrainConfig)
    """The training loop."""
    ds: RMDeepSpeedConfig = field(default_factory=RMDeepSpeedConfig)
    """DeepSpeed."""
    logger: LoggerConfig = field(default_factory=lambda: logged_as("rm"))
    """Logs."""
